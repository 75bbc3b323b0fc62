"""One MoE layer's decode step against the read bandwidth, in one process and in alternation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from freetoken.bench.blocks import Bytes, matrix_bytes, random_matrix
from freetoken.bench.counts import check_counts
from freetoken.bench.memory import huge_buffer, pool_bytes, read_gbps
from freetoken.errors import ConfigError, FreeTokenError
from freetoken.formats import FORMATS, WeightFormat
from freetoken.kernels.base import ExpertBank, ExpertKernel, ExpertPart
from freetoken.kernels.cpu import CpuOps

_WARM_UP_CALLS = 10
_LEAST_LAYERS = 4  # of a step
_READ_BYTES = 64 << 20  # long enough that waking the threads does not count
_PLANE_ALIGNMENT_BYTES = 64
_ASK_LESS = ", or ask for fewer tokens, or fewer or smaller experts"
_DISTINCT_EXPERTS = 4  # what differs between experts; the others repeat their bytes


@dataclass(frozen=True)
class ExpertShape:
    """`experts` experts of gate and up [intermediate, hidden] and down [hidden, intermediate],
    of which every token asks for `top_k`."""

    hidden: int = 2048
    intermediate: int = 768
    experts: int = 64
    top_k: int = 8

    def __post_init__(self) -> None:
        check_counts(**vars(self))
        if self.top_k > self.experts:
            raise ConfigError(f"--top-k: found {self.top_k}, expected at most {self.experts}")

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of gate, up and down."""
        return (
            (self.intermediate, self.hidden),
            (self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        )


@dataclass(frozen=True)
class ExpertsResult:
    """Medians over calls; GB are 10^9 bytes. `gbps` counts each distinct expert of a call once,
    `fraction` is gbps / read_gbps, `distinct_experts` and `bytes_per_layer` are means."""

    format: str
    isa: str
    gbps: float
    read_gbps: float
    fraction: float
    layer_us: float
    bytes_per_layer: float
    distinct_experts: float
    expert_bytes: int
    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    threads: int
    calls: int


def formats_with_kernels(isa: str | None = None) -> list[WeightFormat]:
    """What `measure_experts` can measure on an instruction set (None: this machine's best)."""
    ops = CpuOps(1, isa)
    try:
        return [fmt for name, fmt in FORMATS.items() if name in ops.formats]
    finally:
        ops.close()


def named_formats(names: str, isa: str | None = None) -> list[WeightFormat]:
    """Of names with commas between them. Raises ConfigError for one without kernel."""
    there = {fmt.name: fmt for fmt in formats_with_kernels(isa)}
    for name in names.split(","):
        if name not in there:
            raise ConfigError(
                f"--format: found {name!r}, expected some of {', '.join(there)}, or all"
            )
    return [there[name] for name in names.split(",")]


def check_blocks(fmt: WeightFormat, shape: ExpertShape) -> None:
    """Raises ConfigError for sizes that the format's blocks do not fit."""
    for _, cols in shape.parts:
        if cols % fmt.block_elements:
            raise ConfigError(
                f"--format {fmt.name}: found {cols} columns, expected a multiple of "
                f"{fmt.block_elements} (--hidden and --intermediate)"
            )


def measure_experts(
    fmt: WeightFormat,
    shape: ExpertShape,
    *,
    tokens: int = 1,
    calls: int = 200,
    threads: int | None = None,
    isa: str | None = None,
) -> ExpertsResult:
    """Time `calls` decode steps of random routes, each followed by a read of as random a stretch
    of the same pool. Raises ConfigError for sizes that the format's blocks do not fit, and
    CapacityError for more tokens or experts than fit into memory."""
    check_counts(tokens=tokens, calls=calls)
    check_blocks(fmt, shape)
    ops = CpuOps(threads, isa)
    try:
        return _Bench(fmt, shape, ops, tokens).run(calls)
    finally:
        ops.close()


def random_layer(fmt: WeightFormat, shape: ExpertShape) -> ExpertBank:
    """One layer of random experts in memory of its own."""
    layout = _LayerLayout(fmt, shape)
    memory = huge_buffer(layout.bytes, ask_less=_ASK_LESS)
    layout.fill(memory, np.random.default_rng(0))
    return layout.bank(memory)


class _Bench:
    """Layers of random experts in one pool, visited in turn."""

    def __init__(self, fmt: WeightFormat, shape: ExpertShape, ops: CpuOps, tokens: int) -> None:
        self._shape = shape
        self._tokens = tokens
        self._format = fmt
        self._ops = ops
        self._rng = np.random.default_rng(0)
        self._expert_bytes = sum(sum(matrix_bytes(fmt, *part)) for part in shape.parts)
        layer = _LayerLayout(fmt, shape)
        layers = max(_LEAST_LAYERS, -(-pool_bytes() // layer.bytes))
        self._pool = huge_buffer(
            layers * layer.bytes,
            beside_bytes=_step_bytes(shape, tokens, layers),
            ask_less=_ASK_LESS,
        )
        self._kernels: list[ExpertKernel] = []
        layer.fill(self._pool[: layer.bytes], self._rng)
        for i in range(layers):
            memory = self._pool[i * layer.bytes : (i + 1) * layer.bytes]
            if i:
                memory[:] = self._pool[: layer.bytes]
            self._kernels.append(ops.expert_kernel(layer.bank(memory)))

    def run(self, calls: int) -> ExpertsResult:
        """Every call is one step through all layers of the pool, replayed as a decode step is."""
        shape, tokens, layers = self._shape, self._tokens, len(self._kernels)
        x = torch.from_numpy(self._rng.standard_normal((tokens, shape.hidden), np.float32))
        weights = torch.full((tokens, shape.top_k), 1 / shape.top_k)
        ids = [self._routes(tokens) for _ in self._kernels]
        outputs, step = self._ops.record(
            lambda: [kernel(x, weights, at) for kernel, at in zip(self._kernels, ids, strict=True)]
        )
        seconds, speeds, reads, distinct = [], [], [], []
        for i in range(_WARM_UP_CALLS + calls):
            for at in ids:
                at.copy_(self._routes(tokens))
            start = time.perf_counter()
            step.replay()
            took = time.perf_counter() - start
            read = read_gbps(self._ops, self._stretch())
            if i < _WARM_UP_CALLS:
                continue
            experts = sum(len(set(at.flatten().tolist())) for at in ids)
            seconds.append(took / layers)
            distinct.append(experts / layers)
            speeds.append(experts * self._expert_bytes / took * 1e-9)
            reads.append(read)
        if not all(torch.isfinite(y).all() for y in outputs):
            raise FreeTokenError(f"the {self._format.name} kernel returned NaN or infinity")
        gbps, beside = statistics.median(speeds), statistics.median(reads)
        return ExpertsResult(
            format=self._format.name,
            isa=self._ops.description,
            gbps=gbps,
            read_gbps=beside,
            fraction=gbps / beside,
            layer_us=statistics.median(seconds) * 1e6,
            bytes_per_layer=statistics.mean(distinct) * self._expert_bytes,
            distinct_experts=statistics.mean(distinct),
            expert_bytes=self._expert_bytes,
            tokens=tokens,
            threads=self._ops.threads,
            calls=calls,
            **vars(shape),
        )

    def _routes(self, tokens: int) -> torch.Tensor:
        """Distinct experts for each token; tokens share some by chance."""
        every = np.tile(np.arange(self._shape.experts, dtype=np.int32), (tokens, 1))
        chosen = self._rng.permuted(every, axis=1)[:, : self._shape.top_k]
        return torch.from_numpy(np.ascontiguousarray(chosen))

    def _stretch(self) -> Bytes:
        size = min(_READ_BYTES, len(self._pool))
        start = int(self._rng.integers(0, len(self._pool) - size + 1)) // 4096 * 4096
        return self._pool[start : start + size]


def _step_bytes(shape: ExpertShape, tokens: int, layers: int) -> int:
    """What a step takes beside the weights: each layer's routes (drawn from a table of all experts)
    and float64 result, and the kernel's float32 work: all experts' activations."""
    routes = layers * tokens * shape.top_k * 4 + 2 * tokens * shape.experts * 4
    results = layers * tokens * shape.hidden * 8
    work = tokens * shape.top_k * (2 * shape.intermediate + 2 * shape.hidden) * 4
    return routes + results + work + tokens * shape.hidden * 8


class _LayerLayout:
    """Where the planes of one layer's experts lie: for each part all codes, then all scales."""

    def __init__(self, fmt: WeightFormat, shape: ExpertShape) -> None:
        self._format = fmt
        self._shape = shape
        self._planes: list[tuple[int, int]] = []  # offsets of codes and scales, by part
        offset = 0
        for part in shape.parts:
            code_bytes, scale_bytes = matrix_bytes(fmt, *part)
            scales = _aligned(offset + shape.experts * code_bytes)
            self._planes.append((offset, scales))
            offset = _aligned(scales + shape.experts * scale_bytes)
        self.bytes = offset

    def fill(self, memory: Bytes, rng: np.random.Generator) -> None:
        for part, planes in zip(self._shape.parts, self._planes, strict=True):
            made = [
                random_matrix(self._format, *part, rng)
                for _ in range(min(_DISTINCT_EXPERTS, self._shape.experts))
            ]
            for expert in range(self._shape.experts):
                matrix = made[expert % len(made)]
                for offset, plane in zip(planes, (matrix.codes, matrix.scales), strict=True):
                    if plane is not None:
                        at = offset + expert * plane.nbytes
                        memory[at : at + plane.nbytes] = plane

    def bank(self, memory: Bytes) -> ExpertBank:
        gate, up, down = (
            self._part(memory.ctypes.data, planes, rows, cols)
            for planes, (rows, cols) in zip(self._planes, self._shape.parts, strict=True)
        )
        return ExpertBank(gate, up, down, "silu", owners=(memory,))

    def _part(self, base: int, planes: Sequence[int], rows: int, cols: int) -> ExpertPart:
        fmt = self._format
        code_bytes, scale_bytes = matrix_bytes(fmt, rows, cols)
        each = np.arange(self._shape.experts, dtype=np.uint64)
        codes = np.uint64(base + planes[0]) + each * np.uint64(code_bytes)
        if fmt.scale_block is None:
            return ExpertPart(
                fmt,
                rows,
                cols,
                codes=codes + np.uint64(fmt.codes.offset),
                scales=codes + np.uint64(fmt.scales.offset),
                code_row_stride_bytes=fmt.row_bytes(cols),
                code_block_stride_bytes=fmt.block_bytes,
                scale_row_stride_bytes=fmt.row_bytes(cols),
                scale_block_stride_bytes=fmt.block_bytes,
            )
        return ExpertPart(
            fmt,
            rows,
            cols,
            codes=codes,
            scales=np.uint64(base + planes[1]) + each * np.uint64(scale_bytes),
            code_row_stride_bytes=fmt.row_bytes(cols),
            code_block_stride_bytes=fmt.block_bytes,
            scale_row_stride_bytes=fmt.scale_plane(rows, cols)[1],
            scale_block_stride_bytes=fmt.scales.bytes,
        )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _PLANE_ALIGNMENT_BYTES) * _PLANE_ALIGNMENT_BYTES
