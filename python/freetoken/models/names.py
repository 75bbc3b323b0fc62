"""What the tensors of a checkpoint are called.

Names are templates: "{layer}" is the layer's index, "{expert}" the expert's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from freetoken.checkpoints.base import Checkpoint, TensorEntry
from freetoken.errors import CheckpointError
from freetoken.moe.store import ExpertTensor

Shape = tuple[int, ...]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ExpertSizes:
    """Experts of one layer: gate and up are [I, H], down is [H, I]."""

    experts: int
    hidden: int
    intermediate: int

    def of(self, part: str) -> tuple[int, int]:
        """Rows and columns of a part."""
        if part == "down":
            return self.hidden, self.intermediate
        return self.intermediate, self.hidden


class ExpertLayout(Protocol):
    """How a checkpoint holds the experts of one layer."""

    def shapes(self, layer: int, sizes: ExpertSizes) -> Iterator[tuple[str, Shape]]:
        """Names and shapes of all tensors, in a fixed order."""
        ...

    def parts(
        self, checkpoint: Checkpoint, layer: int, sizes: ExpertSizes
    ) -> tuple[ExpertTensor, ExpertTensor, ExpertTensor]:
        """gate, up and down as views, zero copy. The shapes have been checked."""
        ...


@dataclass(frozen=True)
class StackedExperts:
    """One tensor [E, N, K] for each part."""

    gate: str
    up: str
    down: str

    def shapes(self, layer: int, sizes: ExpertSizes) -> Iterator[tuple[str, Shape]]:
        for part, name in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            yield name.format(layer=layer), (sizes.experts, *sizes.of(part))

    def parts(
        self, checkpoint: Checkpoint, layer: int, sizes: ExpertSizes
    ) -> tuple[ExpertTensor, ExpertTensor, ExpertTensor]:
        def part(part: str, name: str) -> ExpertTensor:
            entry = checkpoint.tensor(name.format(layer=layer))
            return _part(part, entry, sizes, _matrices(entry))

        return part("gate", self.gate), part("up", self.up), part("down", self.down)


@dataclass(frozen=True)
class FusedGateUpExperts:
    """gate and up in one tensor [E, 2 * I, H], gate first or row by row; down [E, H, I]."""

    gate_up: str
    down: str
    interleaved: bool = False

    def shapes(self, layer: int, sizes: ExpertSizes) -> Iterator[tuple[str, Shape]]:
        yield (
            self.gate_up.format(layer=layer),
            (sizes.experts, 2 * sizes.intermediate, sizes.hidden),
        )
        yield self.down.format(layer=layer), (sizes.experts, *sizes.of("down"))

    def parts(
        self, checkpoint: Checkpoint, layer: int, sizes: ExpertSizes
    ) -> tuple[ExpertTensor, ExpertTensor, ExpertTensor]:
        gate_up = checkpoint.tensor(self.gate_up.format(layer=layer))
        down = checkpoint.tensor(self.down.format(layer=layer))
        gate, up = _halves(gate_up, sizes.intermediate, self.interleaved)
        return (
            _part("gate", gate_up, sizes, gate),
            _part("up", gate_up, sizes, up),
            _part("down", down, sizes, _matrices(down)),
        )


@dataclass(frozen=True)
class SeparateExperts:
    """One tensor [N, K] for each part of each expert."""

    gate: str
    up: str
    down: str

    def shapes(self, layer: int, sizes: ExpertSizes) -> Iterator[tuple[str, Shape]]:
        for expert in range(sizes.experts):
            for part, name in (("gate", self.gate), ("up", self.up), ("down", self.down)):
                yield name.format(layer=layer, expert=expert), sizes.of(part)

    def parts(
        self, checkpoint: Checkpoint, layer: int, sizes: ExpertSizes
    ) -> tuple[ExpertTensor, ExpertTensor, ExpertTensor]:
        def part(part: str, name: str) -> ExpertTensor:
            entries = [
                checkpoint.tensor(name.format(layer=layer, expert=expert))
                for expert in range(sizes.experts)
            ]
            for entry in entries:
                _same_format(entries[0], entry)
            return _part(part, entries[0], sizes, _joined(entries))

        return part("gate", self.gate), part("up", self.up), part("down", self.down)


Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Biases:
    """What is added to the products of a layer's experts: float32 [E, I], [E, I] and [E, H]."""

    gate: Float32
    up: Float32
    down: Float32


@dataclass(frozen=True)
class ExpertBiases:
    """Names of the biases of a layer's experts: one tensor [E, rows] for each part, or gate and up
    in one [E, 2 * I] with the two in turn. They are small, and copied as float32."""

    down: str
    gate: str = ""
    up: str = ""
    gate_up: str = ""

    def shapes(self, layer: int, sizes: ExpertSizes) -> Iterator[tuple[str, Shape]]:
        """Names and shapes of all tensors, in a fixed order."""
        if self.gate_up:
            yield self.gate_up.format(layer=layer), (sizes.experts, 2 * sizes.intermediate)
        else:
            yield self.gate.format(layer=layer), (sizes.experts, sizes.intermediate)
            yield self.up.format(layer=layer), (sizes.experts, sizes.intermediate)
        yield self.down.format(layer=layer), (sizes.experts, sizes.hidden)

    def read(self, checkpoint: Checkpoint, layer: int) -> Biases:
        """The shapes have been checked."""

        def numbers(name: str) -> Float32:
            return checkpoint.tensor(name.format(layer=layer)).dequantize()

        if self.gate_up:
            both = numbers(self.gate_up)
            gate, up = both[:, 0::2], both[:, 1::2]
        else:
            gate, up = numbers(self.gate), numbers(self.up)
        down = numbers(self.down)
        return Biases(np.array(gate), np.array(up), np.array(down))


@dataclass(frozen=True)
class TensorNames:
    """The names of one naming scheme. A bias has its weight's name with "bias" at the end.
    `sinks` and `expert_biases` are asked for only where a spec says that there are some.

    `experts` are the layouts that files in this scheme come in; `ignored` are regular expressions
    of tensors that carry no weights.
    """

    embedding: str
    final_norm: str
    lm_head: str
    attention_norm: str
    query: str
    key: str
    value: str
    output: str
    query_norm: str
    key_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    router: str
    experts: tuple[ExpertLayout, ...]
    ignored: tuple[str, ...]
    sinks: str = ""
    expert_biases: ExpertBiases = ExpertBiases("")

    def expert_layout(self, checkpoint: Checkpoint, layer: int, sizes: ExpertSizes) -> ExpertLayout:
        """The layout whose first tensor the checkpoint has; the first layout if it has none (the
        missing tensors are then reported in its names)."""
        for layout in self.experts:
            first, _ = next(layout.shapes(layer, sizes))
            if first in checkpoint:
                return layout
        return self.experts[0]


def bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


@dataclass(frozen=True)
class _Matrices:
    """A matrix for each expert: codes [N, row bytes], scales (if they lie apart), factors."""

    codes: tuple[Bytes, ...]
    scales: tuple[Bytes, ...]
    factors: npt.NDArray[np.float32] | None


def _matrices(entry: TensorEntry) -> _Matrices:
    """A stack [E, N, K], or one matrix [N, K] as a stack of one."""
    rows, cols = entry.shape[-2:]
    codes = entry.data.reshape(-1, rows, entry.format.row_bytes(cols))
    scales: tuple[Bytes, ...] = ()
    if entry.scales is not None:
        scales = tuple(entry.scales.reshape(-1, *entry.format.scale_plane(rows, cols)))
    factors = None if entry.factors is None else entry.factors.reshape(-1)
    return _Matrices(tuple(codes), scales, factors)


def _halves(entry: TensorEntry, rows: int, interleaved: bool) -> tuple[_Matrices, _Matrices]:
    """gate and up, `rows` rows each, of a stack that holds both."""
    both = _matrices(entry)
    scale_rows = (entry.format.scale_block or (1, 1))[0]
    if scale_rows > 1 and (interleaved or rows % scale_rows):
        raise CheckpointError(
            "gate and up share scales",
            file=entry.file,
            tensor=entry.name,
            found=f"{rows} rows each, {'row by row' if interleaved else 'one after the other'}",
            expected=f"gate first, in a multiple of {scale_rows} rows",
            hint="use a checkpoint that keeps gate and up in tensors of their own",
        )

    def half(second: bool) -> _Matrices:
        def cut(planes: tuple[Bytes, ...], count: int) -> tuple[Bytes, ...]:
            if interleaved:
                return tuple(plane[int(second) :: 2] for plane in planes)
            return tuple(plane[count:] if second else plane[:count] for plane in planes)

        return _Matrices(cut(both.codes, rows), cut(both.scales, rows // scale_rows), both.factors)

    return half(False), half(True)


def _joined(entries: Sequence[TensorEntry]) -> _Matrices:
    """One tensor for each expert."""
    stacks = [_matrices(entry) for entry in entries]
    factors = None
    if any(stack.factors is not None for stack in stacks):
        ones = np.ones(1, np.float32)
        factors = np.concatenate([ones if s.factors is None else s.factors for s in stacks])
    return _Matrices(
        tuple(stack.codes[0] for stack in stacks),
        tuple(plane for stack in stacks for plane in stack.scales),
        factors,
    )


def _part(part: str, entry: TensorEntry, sizes: ExpertSizes, experts: _Matrices) -> ExpertTensor:
    rows, cols = sizes.of(part)
    return ExpertTensor(
        part, entry.format, rows, cols, experts.codes, experts.scales, experts.factors
    )


def _same_format(first: TensorEntry, other: TensorEntry) -> None:
    if other.format != first.format:
        raise CheckpointError(
            "the experts of a layer are in different formats",
            file=other.file,
            tensor=other.name,
            found=other.format.name,
            expected=f"{first.format.name}, as {first.name}",
            hint="convert the checkpoint so that all experts of a layer share one format",
        )


_HF_LAYER = "model.layers.{layer}."
HF_NAMES = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    lm_head="lm_head.weight",
    attention_norm=_HF_LAYER + "input_layernorm.weight",
    query=_HF_LAYER + "self_attn.q_proj.weight",
    key=_HF_LAYER + "self_attn.k_proj.weight",
    value=_HF_LAYER + "self_attn.v_proj.weight",
    output=_HF_LAYER + "self_attn.o_proj.weight",
    query_norm=_HF_LAYER + "self_attn.q_norm.weight",
    key_norm=_HF_LAYER + "self_attn.k_norm.weight",
    mlp_norm=_HF_LAYER + "post_attention_layernorm.weight",
    gate=_HF_LAYER + "mlp.gate_proj.weight",
    up=_HF_LAYER + "mlp.up_proj.weight",
    down=_HF_LAYER + "mlp.down_proj.weight",
    router=_HF_LAYER + "mlp.gate.weight",
    experts=(
        SeparateExperts(
            gate=_HF_LAYER + "mlp.experts.{expert}.gate_proj.weight",
            up=_HF_LAYER + "mlp.experts.{expert}.up_proj.weight",
            down=_HF_LAYER + "mlp.experts.{expert}.down_proj.weight",
        ),
        FusedGateUpExperts(
            gate_up=_HF_LAYER + "mlp.experts.gate_up_proj",
            down=_HF_LAYER + "mlp.experts.down_proj",
        ),
    ),
    # tables that older versions of transformers saved; they follow from the config
    ignored=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",),
)

_GGUF_LAYER = "blk.{layer}."
GGUF_NAMES = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    lm_head="output.weight",
    attention_norm=_GGUF_LAYER + "attn_norm.weight",
    query=_GGUF_LAYER + "attn_q.weight",
    key=_GGUF_LAYER + "attn_k.weight",
    value=_GGUF_LAYER + "attn_v.weight",
    output=_GGUF_LAYER + "attn_output.weight",
    query_norm=_GGUF_LAYER + "attn_q_norm.weight",
    key_norm=_GGUF_LAYER + "attn_k_norm.weight",
    mlp_norm=_GGUF_LAYER + "ffn_norm.weight",
    gate=_GGUF_LAYER + "ffn_gate.weight",
    up=_GGUF_LAYER + "ffn_up.weight",
    down=_GGUF_LAYER + "ffn_down.weight",
    router=_GGUF_LAYER + "ffn_gate_inp.weight",
    experts=(
        StackedExperts(
            gate=_GGUF_LAYER + "ffn_gate_exps.weight",
            up=_GGUF_LAYER + "ffn_up_exps.weight",
            down=_GGUF_LAYER + "ffn_down_exps.weight",
        ),
        FusedGateUpExperts(
            gate_up=_GGUF_LAYER + "ffn_gate_up_exps.weight",
            down=_GGUF_LAYER + "ffn_down_exps.weight",
        ),
        SeparateExperts(  # files of early 2024
            gate=_GGUF_LAYER + "ffn_gate.{expert}.weight",
            up=_GGUF_LAYER + "ffn_up.{expert}.weight",
            down=_GGUF_LAYER + "ffn_down.{expert}.weight",
        ),
    ),
    # rope_freqs.weight is read with the rotary keys; attn_rot_embd follows from them
    ignored=(r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd\.weight"),
)
