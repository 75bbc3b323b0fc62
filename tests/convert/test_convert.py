"""Converted files: loaded again, their logits against those of the numbers that went in."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from typer.testing import CliRunner

from freetoken.checkpoints import open_checkpoint
from freetoken.cli.app import app
from freetoken.convert import QUANTIZABLE, convert
from freetoken.convert import output as output_module
from freetoken.errors import CheckpointError, ConfigError, FreeTokenError
from freetoken.tokenizer import load_tokenizer
from support.conversion import (
    GPT_OSS_ROPE,
    TOKENS,
    TOLERANCE,
    logits_of,
    model_of,
    rms_error,
)
from support.decoding import relative_error
from support.tiny_gguf import write_gguf
from support.tiny_models import (
    BYTE_VOCAB,
    FAMILIES,
    MOE_FAMILIES,
    reference_logits,
    rewrite_config,
    save_hf,
)
from support.tokenizer_files import (
    BYTE_LEVEL_SPECIALS,
    TEXTS,
    trained_byte_level,
    trained_sentencepiece,
    write_files,
)

WIDE: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 256, "intermediate_size": 256},
    "qwen3_moe": {"hidden_size": 256, "intermediate_size": 64, "moe_intermediate_size": 256},
}
# Root mean square error of the logits. Beside the error of the experts' weights it holds that of a
# router which, fed other numbers, may choose another expert: these models are all noise.
LOGIT_ERROR = {
    "F32": 1e-5, "F16": 2e-3, "BF16": 1e-2, "Q8_0": 0.05, "Q6_K": 0.1, "Q5_K": 0.2,
    "Q4_K": 0.3, "Q4_1": 0.4, "Q4_0": 0.4, "MXFP4": 0.4, "NVFP4": 0.4,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_a_directory_of_every_family_keeps_its_logits(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = model_of(family, num_attention_heads=4, num_key_value_heads=2)
    source = save_hf(model, tmp_path / "hf", dtype=dtype)
    made = convert(source, tmp_path / "m.gguf", experts="BF16")
    assert relative_error(logits_of(made.path), reference_logits(model, TOKENS)) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3_moe", {"attention_bias": True, "norm_topk_prob": False}),
        ("mistral", {"sliding_window": 3}),
    ],
)
def test_ties_biases_and_windows(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(family, **overrides)
    source = save_hf(model, tmp_path / "hf")
    made = convert(source, tmp_path / "m.gguf", experts="F32")
    assert relative_error(logits_of(made.path), reference_logits(model, TOKENS)) < TOLERANCE


@pytest.mark.parametrize("experts", ["F32", "Q8_0", "NVFP4"])
def test_gpt_oss_with_sinks_biases_and_windows(experts: str, tmp_path: Path) -> None:
    model = model_of(
        "gpt_oss", hidden_size=64, intermediate_size=64, swiglu_limit=7.0,
        rope_parameters=GPT_OSS_ROPE,
    )  # fmt: skip
    made = convert(save_hf(model, tmp_path / "hf"), tmp_path / "m.gguf", experts=experts)
    error = rms_error(logits_of(made.path), reference_logits(model, TOKENS))
    assert error < max(LOGIT_ERROR[experts], 1e-4)


def test_what_the_keys_cannot_say_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = model_of("gpt_oss", swiglu_limit=1.5, rope_parameters=GPT_OSS_ROPE)
    source = save_hf(model, tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"found:    mlps: .*limit=1\.5(.|\n)*limit=7\.0"):
        convert(source, tmp_path / "m.gguf", experts="F32")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("experts", QUANTIZABLE)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_in_every_format(family: str, experts: str, tmp_path: Path) -> None:
    model = model_of(family, **WIDE[family])
    source = save_hf(model, tmp_path / "hf")
    made = convert(source, tmp_path / "m.gguf", experts=experts, dense="F32")
    error = rms_error(logits_of(made.path), reference_logits(model, TOKENS))
    assert error < LOGIT_ERROR[experts]
    types = {t.name: t.tensor_type for t in gguf.GGUFReader(made.path).tensors}
    assert types["blk.1.ffn_down_exps.weight"] == Q[experts]
    assert types["blk.1.attn_q.weight"] == types["blk.1.ffn_gate_inp.weight"] == Q.F32


def test_dense_weights_in_a_chosen_format(tmp_path: Path) -> None:
    source = save_hf(
        model_of("mixtral", **WIDE["mixtral"], head_dim=64, num_attention_heads=4), tmp_path / "hf"
    )
    made = convert(source, tmp_path / "m.gguf", experts="Q8_0", dense="Q6_K")
    types = {t.name: t.tensor_type for t in gguf.GGUFReader(made.path).tensors}
    assert types["blk.0.attn_k.weight"] == types["token_embd.weight"] == Q.Q6_K
    assert types["blk.0.attn_norm.weight"] == Q.F32


@pytest.mark.parametrize("per_expert", [False, True])
def test_a_gguf_file_keeps_its_metadata_and_everything_but_the_experts(
    per_expert: bool, tmp_path: Path
) -> None:
    model = model_of("mixtral", hidden_size=96, intermediate_size=64, vocab_size=300)
    tiny = write_gguf(
        model, tmp_path / "in.gguf", expert_type=Q.F16, dense_type=Q.F16, tokenizer=True,
        per_expert=per_expert,
    )  # fmt: skip
    made = convert(tiny.path, tmp_path / "out.gguf", experts="Q8_0")
    before, after = gguf.GGUFReader(tiny.path), gguf.GGUFReader(made.path)
    for key, field in before.fields.items():
        if not key.startswith(("GGUF.", "general.file_type", "general.quantization")):
            assert after.fields[key].contents() == field.contents(), key
            assert after.fields[key].types == field.types, key
    old = {t.name: t for t in before.tensors}
    for tensor in after.tensors:
        if tensor.name in old and "_exps" not in tensor.name:
            assert bytes(tensor.data) == bytes(old[tensor.name].data), tensor.name
    assert rms_error(logits_of(made.path), reference_logits(tiny.reference, TOKENS)) < 0.02


def test_experts_that_have_the_format_already_are_copied(tmp_path: Path) -> None:
    model = model_of("qwen3_moe", hidden_size=64, moe_intermediate_size=32)
    tiny = write_gguf(model, tmp_path / "in.gguf", expert_type=Q.Q4_0)
    made = convert(tiny.path, tmp_path / "out.gguf", experts="Q4_0")
    old = {t.name: bytes(t.data) for t in gguf.GGUFReader(tiny.path).tensors}
    assert {t.name: bytes(t.data) for t in gguf.GGUFReader(made.path).tensors} == old


def test_a_byte_level_tokenizer_is_carried_over(tmp_path: Path) -> None:
    source = save_hf(model_of("qwen3_moe", vocab_size=900), tmp_path / "hf")
    settings = {
        "bos_token": BYTE_LEVEL_SPECIALS[1],
        "eos_token": BYTE_LEVEL_SPECIALS[2],
        "chat_template": "{{ messages[0]['content'] }}",
    }
    write_files(
        source, [("tokenizer.json", trained_byte_level()), ("tokenizer_config.json", settings)]
    )
    _same_tokenizer(source, tmp_path)


def test_a_far_id_of_a_token_is_refused(tmp_path: Path) -> None:
    source = save_hf(model_of("qwen3_moe", vocab_size=900), tmp_path / "hf")
    described = json.loads(trained_byte_level())
    described["added_tokens"].append({**described["added_tokens"][0], "id": 2**32 - 1})
    described["added_tokens"][-1]["content"] = "<far>"
    write_files(source, [("tokenizer.json", json.dumps(described))])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .* impossible id\n.*4294967295"):
        convert(source, tmp_path / "out.gguf", experts="BF16")


def test_a_sentencepiece_tokenizer_is_carried_over(tmp_path: Path) -> None:
    source = save_hf(model_of("mixtral", vocab_size=900), tmp_path / "hf")
    write_files(
        source,
        [("tokenizer.model", trained_sentencepiece()), ("tokenizer_config.json", {"legacy": True})],
    )
    _same_tokenizer(source, tmp_path)


def _same_tokenizer(source: Path, folder: Path) -> None:
    made = convert(source, folder / "m.gguf", experts="F16")
    before = load_tokenizer(open_checkpoint(source))
    after = load_tokenizer(open_checkpoint(made.path))
    for text in TEXTS:
        assert after.encode(text) == before.encode(text), text
    assert after.bos_id == before.bos_id
    assert after.eos_ids >= before.eos_ids  # GGUF files end at known ends of turns besides
    assert after.has_chat_template == before.has_chat_template


def test_a_model_without_a_tokenizer_stays_without(tmp_path: Path) -> None:
    source = save_hf(model_of("mixtral"), tmp_path / "hf")
    made = convert(source, tmp_path / "m.gguf", experts="F16")
    assert not load_tokenizer(open_checkpoint(made.path)).has_text


def test_a_way_to_cut_words_without_a_name_is_refused(tmp_path: Path) -> None:
    source = save_hf(model_of("mixtral", vocab_size=900), tmp_path / "hf")
    described = json.loads(trained_byte_level())
    described["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False},
        ],
    }  # fmt: skip
    write_files(source, [("tokenizer.json", described)])
    with pytest.raises(CheckpointError, match="a way to cut words that GGUF has no name for"):
        convert(source, tmp_path / "m.gguf", experts="F16")


def test_more_tokens_than_the_embedding_has_rows(tmp_path: Path) -> None:
    source = save_hf(model_of("mixtral", vocab_size=BYTE_VOCAB), tmp_path / "hf", tokenizer=True)
    write_files(source, [("tokenizer.json", trained_byte_level())])
    with pytest.raises(CheckpointError, match="tokens\n  expected: at most the embedding's 258"):
        convert(source, tmp_path / "m.gguf", experts="F16")


def test_formats_that_gguf_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--experts: found 'DS_FP4', expected one of F32"):
        convert(tmp_path, tmp_path / "m.gguf", experts="DS_FP4")
    with pytest.raises(ConfigError, match="--dense: found 'q4', expected one of"):
        convert(tmp_path, tmp_path / "m.gguf", experts="Q4_0", dense="q4")
    with pytest.raises(ConfigError, match="--dense: NVFP4 is for experts"):
        convert(tmp_path, tmp_path / "m.gguf", experts="Q4_0", dense="NVFP4")


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    source = save_hf(model_of("mixtral"), tmp_path / "hf")
    with pytest.raises(CheckpointError, match="rows of 48 numbers\n  expected: a multiple of 256"):
        convert(source, tmp_path / "m.gguf", experts="Q4_K")
    assert list(tmp_path.iterdir()) == [source]


def test_layers_of_two_kinds_are_refused(tmp_path: Path) -> None:
    source = save_hf(model_of("qwen3_moe", mlp_only_layers=[0]), tmp_path / "hf")
    with pytest.raises(CheckpointError, match="1 MoE layers of 2"):
        convert(source, tmp_path / "m.gguf", experts="F16")


def test_a_link_to_nothing_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to(tmp_path / "target.gguf")
    with pytest.raises(ConfigError, match=r"is a link to nothing \(.*target\.gguf\)"):
        convert(tmp_path, tmp_path / "m.gguf", experts="F16")
    assert (tmp_path / "m.gguf").is_symlink()


def test_empty_lists_in_the_metadata(tmp_path: Path) -> None:
    """GGUF allows them, the gguf package reads but does not write them."""
    tiny = write_gguf(model_of("mixtral"), tmp_path / "in.gguf", expert_type=Q.F16)
    content = tiny.path.read_bytes()

    def pair(key: bytes, value: bytes) -> bytes:
        return struct.pack("<Q", len(key)) + key + value

    tags = pair(b"general.tags", struct.pack("<IIQ", 9, 8, 0))
    pad = -(len(tags) + len(pair(b"general.note", struct.pack("<IQ", 8, 0)))) % 32
    note = pair(b"general.note", struct.pack("<IQ", 8, pad) + b"x" * pad)
    counts = struct.unpack("<QQ", content[8:24])
    head = content[:8] + struct.pack("<QQ", counts[0], counts[1] + 2)
    tiny.path.write_bytes(head + tags + note + content[24:])
    made = convert(tiny.path, tmp_path / "out.gguf", experts="F16")
    fields = gguf.GGUFReader(made.path).fields
    assert fields["general.note"].contents() == "x" * pad and "general.tags" not in fields


def test_an_existing_output_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    out.write_bytes(b"precious")
    with pytest.raises(ConfigError, match=r"m\.gguf exists already; remove it"):
        convert(tmp_path, out, experts="F16")
    assert out.read_bytes() == b"precious"
    with pytest.raises(ConfigError, match="there is no folder"):
        convert(tmp_path, tmp_path / "none" / "m.gguf", experts="F16")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_hf(model_of("mixtral"), tmp_path / "hf")


def test_a_disk_that_is_full_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=10**9, used=10**9, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(
        FreeTokenError, match=r"0 MB free\n  expected: a writable folder with .* MB"
    ):
        convert(source, tmp_path / "m.gguf", experts="F16")
    assert list(tmp_path.iterdir()) == [source]


def test_a_disk_that_fills_up_on_the_way(source: Path, tmp_path: Path) -> None:
    def full(_tensor: str, done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes // 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(FreeTokenError, match=r"No space left on device(.|\n)*free some space"):
        convert(source, tmp_path / "m.gguf", experts="F16", progress=full)
    assert list(tmp_path.iterdir()) == [source]


def test_what_killed_runs_left_is_cleared_but_not_what_live_ones_write(
    source: Path, tmp_path: Path
) -> None:
    dead = tmp_path / ".m.gguf.partial-dead"
    live = tmp_path / ".m.gguf.partial-live"
    other = tmp_path / ".other.gguf.partial-x"
    for path in (dead, live, other):
        path.write_bytes(b"x")
    with live.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        convert(source, tmp_path / "m.gguf", experts="F16")
    assert not dead.exists()
    assert live.exists() and other.exists()


def test_names_with_the_letters_of_patterns(source: Path, tmp_path: Path) -> None:
    assert output_module.glob_escaped("a[b]*?") == "a[[]b][*][?]"
    made = convert(source, tmp_path / "m[1]*.gguf", experts="F16")
    assert made.path.is_file()


def test_interrupted_runs_leave_nothing(source: Path, tmp_path: Path) -> None:
    def interrupt(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "m.gguf", experts="F16", progress=interrupt)
    assert list(tmp_path.iterdir()) == [source]


def test_progress_ends_with_all_bytes(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(
        source, tmp_path / "m.gguf", experts="F16",
        progress=lambda _name, done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_memory_stays_bounded_by_an_expert(tmp_path: Path) -> None:
    model = model_of(
        "mixtral", hidden_size=512, intermediate_size=512, num_local_experts=16, vocab_size=101
    )
    source = save_hf(model, tmp_path / "hf", dtype=torch.bfloat16)
    del model
    peaks: list[int] = []

    def note_peak(*_arguments: Any) -> None:
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()

    tracemalloc.start()
    try:
        convert(source, tmp_path / "m.gguf", experts="Q4_K", progress=note_peak)
    finally:
        tracemalloc.stop()
    one_expert = 512 * 512 * 4
    assert max(peaks[1:]) < 8 * one_expert < 16 * one_expert  # the first is of opening the files


def test_float16_sources_and_shards(tmp_path: Path) -> None:
    model = model_of("mixtral")
    source = save_hf(model, tmp_path / "hf", dtype=torch.float16, max_shard_size="40KB")
    assert (source / "model.safetensors.index.json").is_file()
    rewrite_config(source, torch_dtype="float16")
    made = convert(source, tmp_path / "m.gguf", experts="F16")
    assert relative_error(logits_of(made.path), logits_of(source)) < TOLERANCE


def test_experts_are_not_confused(tmp_path: Path) -> None:
    """Each expert's matrices in their own place: a permutation would move no average."""
    model = model_of("qwen3_moe")
    made = convert(save_hf(model, tmp_path / "hf"), tmp_path / "m.gguf", experts="F32")
    experts = model.model.layers[1].mlp.experts
    stored = {t.name: t.data for t in gguf.GGUFReader(made.path).tensors}
    gate, up = experts.gate_up_proj.detach().numpy().reshape(7, 2, 24, 48).swapaxes(0, 1)
    np.testing.assert_array_equal(stored["blk.1.ffn_gate_exps.weight"], gate)
    np.testing.assert_array_equal(stored["blk.1.ffn_up_exps.weight"], up)
    down = experts.down_proj.detach().numpy()
    np.testing.assert_array_equal(stored["blk.1.ffn_down_exps.weight"], down)


def test_the_command(source: Path, tmp_path: Path) -> None:
    arguments = ["convert", "--model", source, "--out", tmp_path / "m.gguf", "--experts", "BF16"]
    run = CliRunner().invoke(app, [str(a) for a in arguments])
    assert run.exit_code == 0, run.stderr
    assert run.stdout == "" and "m.gguf: " in run.stderr and "BF16" in run.stderr
    again = CliRunner().invoke(app, [str(a) for a in arguments])
    assert again.exit_code == 2
    assert "exists already" in again.stderr and "Traceback" not in again.stderr
