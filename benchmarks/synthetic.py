"""Write a GGUF file of random weights with the layers of Qwen3-30B-A3B, but fewer of them.

    python benchmarks/synthetic.py OUT.gguf --layers 8 --type Q4_0

For speed alone: the model says nothing. All matrices are in the one format; norms and routers are
float32, as in files that people use. There is no tokenizer: `ft bench model` needs none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from freetoken.bench.blocks import random_matrix
from freetoken.formats import by_name

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8
HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 4, 128, 32000
CONTEXT = 32768
TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "NVFP4", "BF16", "F16")
FLOAT32 = "F32"

Shape = tuple[int, ...]


def tensors(layers: int, type_name: str) -> Iterator[tuple[str, Shape, str]]:
    """Name, shape and type of every tensor, in the file's order."""
    yield "token_embd.weight", (VOCAB, HIDDEN), type_name
    yield "output_norm.weight", (HIDDEN,), FLOAT32
    yield "output.weight", (VOCAB, HIDDEN), type_name
    for layer in range(layers):
        for name, shape, kind in (
            ("attn_norm", (HIDDEN,), FLOAT32),
            ("ffn_norm", (HIDDEN,), FLOAT32),
            ("attn_q", (HEADS * HEAD_DIM, HIDDEN), type_name),
            ("attn_k", (KV_HEADS * HEAD_DIM, HIDDEN), type_name),
            ("attn_v", (KV_HEADS * HEAD_DIM, HIDDEN), type_name),
            ("attn_output", (HIDDEN, HEADS * HEAD_DIM), type_name),
            ("attn_q_norm", (HEAD_DIM,), FLOAT32),
            ("attn_k_norm", (HEAD_DIM,), FLOAT32),
            ("ffn_gate_inp", (EXPERTS, HIDDEN), FLOAT32),
            ("ffn_gate_exps", (EXPERTS, INTERMEDIATE, HIDDEN), type_name),
            ("ffn_up_exps", (EXPERTS, INTERMEDIATE, HIDDEN), type_name),
            ("ffn_down_exps", (EXPERTS, HIDDEN, INTERMEDIATE), type_name),
        ):
            yield f"blk.{layer}.{name}.weight", shape, kind


def write_synthetic(out: Path, *, layers: int, type_name: str, seed: int = 0) -> None:
    """One tensor in memory at a time."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(out, "qwen3moe")
    _describe(writer, layers)
    plan = list(tensors(layers, type_name))
    for name, shape, kind in plan:
        tensor_type = gguf.GGMLQuantizationType[kind]
        byte_shape = gguf.quant_shape_to_byte_shape(shape, tensor_type)
        writer.add_tensor_info(
            name, byte_shape, np.dtype(np.uint8), int(np.prod(byte_shape)), tensor_type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, kind in plan:
        writer.write_tensor_data(_data(name, shape, kind, rng))
    writer.close()


def _data(name: str, shape: Shape, kind: str, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    if kind != FLOAT32:
        rows = int(np.prod(shape[:-1]))
        return random_matrix(by_name(kind), rows, shape[-1], rng).codes
    if len(shape) == 1:
        values = np.ones(shape, np.float32)
    else:
        values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    return values.reshape(-1).view(np.uint8)


def _describe(writer: gguf.GGUFWriter, layers: int) -> None:
    writer.add_name(f"random weights, {layers} layers")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(6144)
    writer.add_expert_feed_forward_length(INTERMEDIATE)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("none")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--type", choices=TYPES, default="Q4_0")
    args = parser.parse_args()
    write_synthetic(args.out, layers=args.layers, type_name=args.type)
    sys.stdout.write(f"{args.out}: {args.out.stat().st_size / 2**30:.2f} GiB\n")


if __name__ == "__main__":
    main()
