"""Which tensors the GGUF file has, and where their numbers come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from freetoken.checkpoints.base import Checkpoint, TensorEntry
from freetoken.convert.quantizers import QUANTIZABLE, quantize, tensor_factor, too_large
from freetoken.convert.rope import rope_factors
from freetoken.errors import CheckpointError
from freetoken.formats import BF16, F32, WeightFormat
from freetoken.formats.base import Bytes, Float32
from freetoken.models.families import family_of
from freetoken.models.loader import check_tensors
from freetoken.models.names import ExpertSizes, TensorNames, bias_of
from freetoken.models.spec import DecoderSpec, MoeSpec
from freetoken.moe.store import ExpertTensor

Order = slice | npt.NDArray[np.intp]

_CHUNK_NUMBERS = 1 << 24  # 64 MiB of float32
_CHECKED_BYTES = 1 << 20  # of copied rows, decoded at a time
_INTERLEAVING = ("llama", "mixtral")  # families whose GGUF files pair neighbouring q and k rows

Shape = tuple[int, ...]
Parts = tuple[ExpertTensor, ExpertTensor, ExpertTensor]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the new file. `chunks` makes its bytes, in order, a bounded piece at a time."""

    name: str
    shape: Shape
    format: WeightFormat
    chunks: Callable[[], Iterator[Bytes]]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.format.row_bytes(self.shape[-1])


def plan_tensors(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    experts: WeightFormat,
    dense: WeightFormat | None,
) -> list[PlannedTensor]:
    """All tensors in the order of the file. Raises CheckpointError for a matrix whose rows are no
    whole blocks of the format asked for."""
    names = family_of(checkpoint).names(checkpoint)
    check_tensors(checkpoint, spec, names)
    planner = _Planner(checkpoint, spec, names, experts, dense)
    return list(planner.tensors())


class _Planner:
    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: DecoderSpec,
        names: TensorNames,
        experts: WeightFormat,
        dense: WeightFormat | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._names = names
        self._experts_format = experts
        self._dense_format = dense
        self._kept: tuple[int, Parts] | None = None

    def tensors(self) -> Iterator[PlannedTensor]:
        expert_names = set(self._expert_names())
        if self._checkpoint.kind == "gguf":
            for name in self._checkpoint.names():
                if name not in expert_names:
                    yield self._dense(name, self._checkpoint.tensor(name))
        else:
            yield from self._renamed()
        for layer, mlp in enumerate(self._spec.mlps):
            if isinstance(mlp, MoeSpec):
                yield from self._layer_experts(layer, mlp)

    def _expert_names(self) -> Iterator[str]:
        for layer, mlp in enumerate(self._spec.mlps):
            if isinstance(mlp, MoeSpec):
                sizes = self._sizes(mlp)
                layout = self._names.expert_layout(self._checkpoint, layer, sizes)
                yield from (name for name, _ in layout.shapes(layer, sizes))

    def _sizes(self, moe: MoeSpec) -> ExpertSizes:
        return ExpertSizes(moe.experts, self._spec.hidden, moe.intermediate)

    def _renamed(self) -> Iterator[PlannedTensor]:
        """Every tensor of a Hugging Face checkpoint that has a GGUF name, with its bias."""
        targets = family_of(self._checkpoint).gguf_names
        for field in fields(TensorNames):
            source, target = vars(self._names)[field.name], vars(targets)[field.name]
            if not isinstance(source, str) or not source:
                continue
            if field.name == "lm_head" and self._spec.tied_embeddings:
                continue
            layers = self._spec.layers if "{layer}" in source else 1
            for layer in range(layers):
                pair = source.format(layer=layer), target.format(layer=layer)
                for old, new in (pair, tuple(map(bias_of, pair))):
                    if old in self._checkpoint:
                        yield self._dense(
                            new, self._checkpoint.tensor(old), self._heads(field.name)
                        )
        factors = rope_factors(self._spec.rotary)
        if factors is not None:
            name = "rope_freqs.weight"
            yield PlannedTensor(name, factors.shape, F32, _whole(name, factors))

    def _heads(self, role: str) -> int:
        """How many heads' rows are to be interleaved; 0: leave the rows in order."""
        if self._spec.family not in _INTERLEAVING:
            return 0
        attention = self._spec.attention
        return {"query": attention.heads, "key": attention.kv_heads}.get(role, 0)

    def _dense(self, name: str, entry: TensorEntry, heads: int = 0) -> PlannedTensor:
        target = self._dense_target(name, entry)
        self._check_blocks(entry.file, entry.name, entry.shape[-1], target)

        def chunks() -> Iterator[Bytes]:
            for rows in _row_order(entry.shape, heads):
                yield _converted(entry, rows, target)

        return PlannedTensor(name, entry.shape, target, chunks)

    def _dense_target(self, name: str, entry: TensorEntry) -> WeightFormat:
        if len(entry.shape) < 2 or name.endswith((".bias", "ffn_gate_inp.weight")):
            return F32
        if self._dense_format is not None:
            return self._dense_format
        kept = entry.format.name in QUANTIZABLE and entry.factors is None
        return entry.format if kept else BF16

    def _layer_experts(self, layer: int, moe: MoeSpec) -> Iterator[PlannedTensor]:
        for index, part in enumerate(self._parts(layer, moe)):
            name = f"blk.{layer}.ffn_{part.name}_exps.weight"
            self._check_blocks(self._checkpoint.path, name, part.cols, self._experts_format)
            yield from _expert_tensors(name, part, self._experts_format, self._later(layer, index))
        if self._checkpoint.kind == "safetensors" and moe.expert_bias:
            biases = self._names.expert_biases.read(self._checkpoint, layer)
            for kind, bias in vars(biases).items():
                name = f"blk.{layer}.ffn_{kind}_exps.bias"
                yield PlannedTensor(name, bias.shape, F32, _whole(name, bias))

    def _parts(self, layer: int, moe: MoeSpec) -> Parts:
        """One layer's are kept: some layouts have to be copied to be read by rows."""
        if self._kept is None or self._kept[0] != layer:
            sizes = self._sizes(moe)
            layout = self._names.expert_layout(self._checkpoint, layer, sizes)
            self._kept = layer, layout.parts(self._checkpoint, layer, sizes)
        return self._kept[1]

    def _later(self, layer: int, index: int) -> Callable[[], ExpertTensor]:
        """The part again, when its turn to be written has come."""
        moe = self._spec.mlps[layer]
        assert isinstance(moe, MoeSpec)
        return lambda: self._parts(layer, moe)[index]

    def _check_blocks(self, file: Path, tensor: str, cols: int, target: WeightFormat) -> None:
        if cols % target.block_elements == 0:
            return
        raise CheckpointError(
            f"the rows of this tensor cannot be written as {target.name}",
            file=file,
            tensor=tensor,
            found=f"rows of {cols} numbers",
            expected=f"a multiple of {target.block_elements}",
            hint="choose F16 or BF16, which have no blocks"
            + (", or one with blocks of 32: Q8_0, Q4_0, MXFP4" if cols % 32 == 0 else ""),
        )


def _expert_tensors(
    name: str, part: ExpertTensor, target: WeightFormat, later: Callable[[], ExpertTensor]
) -> Iterator[PlannedTensor]:
    """The stacked tensor of a part, and for NVFP4 the factors of its experts in another."""
    shape = (len(part.experts), part.rows, part.cols)
    copied = part.format == target
    scaled = target.name == "NVFP4"

    def chunks() -> Iterator[Bytes]:
        source = later()
        for expert in range(shape[0]):
            if copied:
                yield _copied(source.experts[expert].reshape(part.rows, -1), target, name)
                continue
            numbers = _expert_numbers(source, expert)
            if scaled:
                _check_numbers(numbers, target, name)
                numbers /= tensor_factor(numbers)
            yield _quantized(numbers, target, name)

    def factors() -> Iterator[Bytes]:
        source = later()
        if copied:
            found = np.ones(shape[0]) if source.factors is None else source.factors
        else:
            found = np.array([tensor_factor(_expert_numbers(source, e)) for e in range(shape[0])])
        yield from _whole(_factor_name(name), found.astype(np.float32))()

    yield PlannedTensor(name, shape, target, chunks)
    if scaled:
        yield PlannedTensor(_factor_name(name), shape[:1], F32, factors)


def _factor_name(weight: str) -> str:
    return weight.removesuffix("weight") + "scale"


def _expert_numbers(part: ExpertTensor, expert: int) -> Float32:
    """Float32 [rows, cols]."""
    factor = 1.0 if part.factors is None else float(part.factors[expert])
    codes = part.experts[expert].reshape(part.rows, -1)
    if part.format.scale_block is None:
        numbers = part.format.dequantize(codes)
        numbers *= np.float32(factor)
        return numbers
    plane = part.format.scale_plane(part.rows, part.cols)
    return part.format.dequantize_planes(codes, part.scales[expert].reshape(plane), factor)


def _row_order(shape: Shape, heads: int) -> Iterator[Order]:
    """Rows in the order of the new file, in pieces of bounded size. With heads, each head's rows go
    from (first half, second half) to pairs of one from either."""
    rows = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
    cols = shape[-1] if len(shape) > 1 else 1
    step = max(1, _CHUNK_NUMBERS // cols)
    if not heads:
        yield from (slice(at, min(at + step, rows)) for at in range(0, rows, step))
        return
    order = np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    yield from (order[at : at + step] for at in range(0, rows, step))


def _converted(
    entry: TensorEntry,
    rows: Order,
    target: WeightFormat,
) -> Bytes:
    if len(entry.shape) == 1:
        return _quantized(entry.dequantize()[rows], target, entry.name)
    fmt = entry.format
    packed = entry.data.reshape(-1, fmt.row_bytes(entry.shape[-1]))
    if fmt == target and entry.factors is None:
        return _copied(packed[rows], target, entry.name)
    if entry.scales is None and entry.factors is None:
        return _quantized(fmt.dequantize(packed[rows]), target, entry.name)
    return _quantized(_planar_rows(entry, rows), target, entry.name)


def _planar_rows(entry: TensorEntry, rows: Order) -> Float32:
    """Rows of a matrix with scales or a factor beside it. It is decoded whole."""
    numbers: Float32 = entry.dequantize().reshape(-1, entry.shape[-1])[rows]
    return numbers


def _quantized(numbers: Float32, target: WeightFormat, name: str) -> Bytes:
    _check_numbers(numbers, target, name)
    return quantize(numbers, target.name)


def _copied(packed: Bytes, fmt: WeightFormat, name: str) -> Bytes:
    """Rows [n, row bytes] that stay as they are, if they are numbers."""
    step = max(1, _CHECKED_BYTES // max(1, packed.shape[-1]))
    for at in range(0, len(packed), step):
        with np.errstate(invalid="ignore", over="ignore"):
            _check_numbers(fmt.dequantize(packed[at : at + step]), fmt, name, copied=True)
    return packed


def _check_numbers(
    numbers: Float32, target: WeightFormat, name: str, *, copied: bool = False
) -> None:
    """Raises CheckpointError for NaN, infinity, and what the format does not reach."""
    magnitudes = np.abs(numbers)
    reach = too_large(target.name)
    hint = "the checkpoint is damaged: download it again, or take another"
    if np.isnan(magnitudes).any():
        found = f"{int(np.isnan(magnitudes).sum())} of {magnitudes.size} numbers are NaN"
    elif np.isinf(magnitudes).any():
        found = f"{int(np.isinf(magnitudes).sum())} of {magnitudes.size} numbers are infinite"
    elif not copied and magnitudes.max(initial=0) >= reach:
        found = f"numbers from {numbers.min()} to {numbers.max()}"
        further = "F32, which reaches" if target is BF16 else "BF16 or F32, which reach"
        hint = f"choose {further} further"
    else:
        return
    raise CheckpointError(
        f"this tensor cannot be written as {target.name}",
        tensor=name,
        found=found,
        expected="finite numbers" + ("" if reach == np.inf else f" below {reach:.6g}"),
        hint=hint,
    )


def _whole(name: str, values: Float32) -> Callable[[], Iterator[Bytes]]:
    """All of a small tensor at once, as float32."""

    def chunks() -> Iterator[Bytes]:
        yield _quantized(values.reshape(1, -1), F32, name).reshape(-1)

    return chunks
