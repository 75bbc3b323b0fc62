"""The operators on the CPU: thin calls into the native core.

The native layer checks every argument (kind, contiguity, shape, index ranges) and names the one
that is wrong: TypeError for kinds, dimensions and strides, ValueError for sizes and values. Nothing
is copied: an input that is not contiguous is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken import _native
from freetoken.checkpoints.base import TensorEntry
from freetoken.errors import CheckpointError, ConfigError
from freetoken.formats.base import WeightFormat
from freetoken.kernels.activations import Activation, ClampedSwiGlu
from freetoken.kernels.base import ExpertBank, ExpertPart, Matrix, PendingExperts

T = TypeVar("T")

ACTIVATIONS = {
    "silu": _native.Activation.SiLU,
    "gelu": _native.Activation.GELU,
    "gelu_tanh": _native.Activation.GELUTanh,
    "relu2": _native.Activation.ReLUSquared,
}


def native_activation(activation: Activation) -> tuple[_native.Activation, float, float]:
    """Kind, alpha and limit. Raises CheckpointError for one without kernel."""
    if isinstance(activation, ClampedSwiGlu):
        return _native.Activation.ClampedSwiGLU, activation.alpha, activation.limit
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            "no CPU kernel for this activation",
            found=activation,
            expected=f"one of {', '.join(ACTIVATIONS)}, or a clamped SwiGLU",
            hint="use a model with one of these activations",
        )
    return ACTIVATIONS[activation], 0.0, 0.0


# How quantised weights read activations (--cpu-activations).
PRECISIONS = {"int8": _native.Precision.Int8, "exact": _native.Precision.Exact}


class CpuPending:
    """Expert work on the pool's own threads. Keeps inputs, output and weights alive."""

    def __init__(self, pending: _native.Pending, out: Tensor) -> None:
        self._pending = pending
        self._out = out

    def wait(self) -> Tensor:
        self._pending.wait()
        return self._out


class CpuRecording:
    """Operators of one context, to be run again in one native call."""

    def __init__(self, context: _native.Context, recording: _native.Recording) -> None:
        self._context = context
        self._recording = recording

    def replay(self) -> None:
        self._context.replay(self._recording)


class CpuExpertKernel:
    """The experts of one bank with the CPU kernels of their formats."""

    def __init__(self, context: _native.Context, bank: _native.ExpertBank) -> None:
        self._context = context
        self._bank = bank

    def __call__(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        out = torch.empty_like(hidden_states, dtype=torch.float64)
        self._context.experts(self._bank, hidden_states, topk_weights, topk_ids, out)
        return out

    def submit(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> PendingExperts:
        out = torch.empty_like(hidden_states, dtype=torch.float64)
        pending = self._context.experts_submit(
            self._bank, hidden_states, topk_weights, topk_ids, out
        )
        return CpuPending(pending, out)

    def add_to(
        self,
        handshake: _native.GpuHandshake,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        out: Tensor,
        name: str,
    ) -> int:
        """A slot of a handshake of the same pool, that computes `out` from what these hold then."""
        return handshake.add_experts(self._bank, hidden_states, topk_weights, topk_ids, out, name)


class CpuOps:
    """freetoken.kernels.base.Ops on a worker pool of its own.

    `threads`: default one per physical core that this process may use. `isa`: an instruction set
    of `_native.detected_isas()`, default the best. `activations`: what quantised weights are
    multiplied with, "int8" blocks or "exact" float32. Raises ConfigError for any of them.
    """

    def __init__(
        self, threads: int | None = None, isa: str | None = None, activations: str = "int8"
    ) -> None:
        if activations not in PRECISIONS:
            raise ConfigError(
                f"cpu_activations: found {activations!r}, expected one of {', '.join(PRECISIONS)}"
            )
        try:
            self._context = _native.Context(threads, isa, PRECISIONS[activations])
        except ValueError as error:
            raise ConfigError(f"cannot start the CPU kernels: {error}") from error
        except TypeError as error:  # a number that no C++ int holds
            raise ConfigError(
                f"cannot start the CPU kernels: threads: found {threads!r}, expected 1 to "
                f"some hundred; instruction set {isa!r}"
            ) from error

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def cache_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def description(self) -> str:
        return self._context.isa

    @property
    def threads(self) -> int:
        return self._context.threads

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the weight formats that have kernels on this instruction set."""
        return tuple(self._context.formats)

    @property
    def can_record(self) -> bool:
        return True

    def record(self, work: Callable[[], T]) -> tuple[T, CpuRecording]:
        self._context.start_recording()
        try:
            result = work()
        finally:
            recording = self._context.stop_recording()
        return result, CpuRecording(self._context, recording)

    @property
    def nodes(self) -> int:
        """NUMA nodes that have threads of the pool. The rows of every matrix are divided between
        them."""
        return len(set(self._context.nodes))

    def place(self, bank: ExpertBank, *, mapped: bool) -> None:
        """Have each page of the experts touched first by a thread of the node that will read it:
        there the system puts it. Does nothing where there is one node, nor to pages that have
        their place already. `mapped`: a file's bytes, which are read from disk now; else memory
        that nobody else uses yet."""
        if self.nodes > 1:
            self._context.place(self._native_bank(bank), mapped)

    def handshake(
        self,
        driver: _native.GpuDriver,
        mechanism: _native.Mechanism,
        capturable: bool,
        stall_limit_seconds: float = 30.0,
    ) -> _native.GpuHandshake:
        """Between the streams of a GPU and these kernels' worker pool, in the way that
        `driver.choose()` found. Close it before this."""
        return _native.GpuHandshake(
            driver, self._context, mechanism, capturable, stall_limit_seconds
        )

    def read_bytes(self, data: npt.NDArray[np.uint8]) -> int:
        """Read uint8 [n] once with all threads; the sum of its 64-bit words. For benchmarks."""
        return self._context.read_bytes(data)

    def close(self) -> None:
        """End the worker threads. Using an operator afterwards raises RuntimeError."""
        self._context.close()

    def matrix(self, entry: TensorEntry) -> Matrix:
        if len(entry.shape) != 2:
            raise CheckpointError(
                "the tensor is no matrix",
                file=entry.file,
                tensor=entry.name,
                found=f"shape {list(entry.shape)}",
                expected="two dimensions",
                hint="the checkpoint does not fit its architecture; fetch it again",
            )
        rows, cols = entry.shape
        factor = 1.0 if entry.factors is None else float(entry.factors)
        matrix = _native.Matrix(
            self._native_format(entry.format), entry.data, rows, cols, entry.scales, factor
        )
        self._context.place_matrix(matrix)
        return matrix

    def expert_kernel(self, bank: ExpertBank) -> CpuExpertKernel:
        return CpuExpertKernel(self._context, self._native_bank(bank))

    def linear(self, x: Tensor, w: Matrix, bias: Tensor | None = None) -> Tensor:
        out = torch.empty(x.shape[0], w.rows)
        self._context.linear((_bound(w),), x, (bias,), (out,))
        return out

    def linear_group(
        self, x: Tensor, matrices: tuple[Matrix, ...], biases: tuple[Tensor | None, ...]
    ) -> list[Tensor]:
        outs = [torch.empty(x.shape[0], w.rows) for w in matrices]
        self._context.linear(_bound(matrices), x, biases, tuple(outs))
        return outs

    def embed(self, ids: Tensor, w: Matrix) -> Tensor:
        out = torch.empty(ids.shape[0], w.cols)
        self._context.embed(_bound(w), ids, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        if x.dim() == 2:
            self._context.rms_norm(x, weight, eps, out)
        else:
            cols = x.shape[-1]
            self._context.rms_norm(_rows(x, cols), weight, eps, out.view(-1, cols))
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._context.add_rms_norm(x, residual, weight, eps, out)
        return out

    def gated_activation(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        out = torch.empty_like(gate)
        self._context.gated_activation(gate, up, *native_activation(activation), out)
        return out

    def rotary_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
        self._context.rotary(q, k, cos, sin, interleaved)

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        self._context.write_kv(k, v, k_cache, v_cache, slots)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        sequence: Tensor,
        positions: Tensor,
        *,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q)
        self._context.paged_attention(
            q, k_cache, v_cache, block_table, sequence, positions, scale, window, sinks, out
        )
        return out

    def to_float32(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape)
        self._context.to_float32(x, out)
        return out

    def route_topk(self, logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
        tokens = logits.shape[0]
        weights = torch.empty(tokens, top_k)
        ids = torch.empty(tokens, top_k, dtype=torch.int32)
        self._context.route_topk(logits, renormalize, weights, ids)
        return weights, ids

    def _native_bank(self, bank: ExpertBank) -> _native.ExpertBank:
        kind, alpha, limit = native_activation(bank.activation)
        return _native.ExpertBank(
            self._native_part(bank.gate),
            self._native_part(bank.up),
            self._native_part(bank.down),
            kind,
            bank.owners,
            alpha,
            limit,
        )

    def _native_part(self, part: ExpertPart) -> _native.ExpertPart:
        return _native.ExpertPart(
            self._native_format(part.format),
            part.rows,
            part.cols,
            _addresses(part.codes),
            _addresses(part.scales),
            part.code_row_stride_bytes,
            part.code_block_stride_bytes,
            part.scale_row_stride_bytes,
            part.scale_block_stride_bytes,
            None if part.factors is None else _addresses(part.factors),
            None if part.biases is None else _addresses(part.biases),
        )

    def _native_format(self, weight_format: WeightFormat) -> _native.Format:
        """The native name of a format. Raises CheckpointError for one without kernels."""
        if weight_format.name not in self.formats:
            raise CheckpointError(
                "no CPU kernel for this weight format",
                found=weight_format.name,
                expected=f"one of {', '.join(self.formats)}",
                hint="use a checkpoint in one of these formats",
            )
        return _native.Format[weight_format.name]


def _bound(w: Matrix | tuple[Matrix, ...]) -> Any:
    """`Ops` takes any platform's Matrix; the native call refuses one that is not its own."""
    return w


def _rows(x: Tensor, cols: int) -> Tensor:
    if not x.is_contiguous():
        raise TypeError("x: found strided memory, expected contiguous memory (call .contiguous())")
    return x.view(-1, cols)


def _addresses(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(values)
