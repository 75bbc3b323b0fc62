"""The operators that a decoder needs. One object per platform implements them all.

Tensors are contiguous, and lie on the operators' device. Activations are float32. `T` tokens, `H`
hidden size, `N` output rows, `K` top_k. Every operator treats each token alone: its result does not
depend, not by a bit, on which other tokens are in the batch. This is what makes a batch of prompts
give each the tokens that it gives alone. On a GPU it may depend on how many they are: a few tokens
and many are computed by different kernels, whose roundings differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.checkpoints.base import TensorEntry
from freetoken.formats.base import WeightFormat
from freetoken.kernels.activations import Activation


class Matrix(Protocol):
    """A weight matrix [rows, cols] bound to the kernels of its format. Keeps its bytes alive."""

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...


@dataclass(frozen=True)
class ExpertPart:
    """One tensor of every expert of a layer, as addresses: gate, up or down.

    `codes` and `scales` are uint64 [E]: where expert e's codes and scales begin. Interleaved bytes
    (a mapped checkpoint) and separate planes (a packed record) differ in the strides alone. Of a
    format with a `scale_block` the scale strides are those of its rows and columns of scales.
    `factors` uint64 [E] is where each expert's float32 factor lies (None: all are one), `biases`
    uint64 [E] where its bias, float32 [rows], begins, which is added to the product (None: there
    are none).
    """

    format: WeightFormat
    rows: int
    cols: int
    codes: npt.NDArray[np.uint64]
    scales: npt.NDArray[np.uint64]
    code_row_stride_bytes: int
    code_block_stride_bytes: int
    scale_row_stride_bytes: int
    scale_block_stride_bytes: int
    factors: npt.NDArray[np.uint64] | None = None
    biases: npt.NDArray[np.uint64] | None = None


@dataclass(frozen=True)
class ExpertBank:
    """The experts of one layer, or the slots of one layer's pool.

    gate and up are [I, H], down is [H, I]. `owners` keeps the memory behind the addresses alive.
    """

    gate: ExpertPart
    up: ExpertPart
    down: ExpertPart
    activation: Activation
    owners: Sequence[Any]

    @property
    def experts(self) -> int:
        return len(self.gate.codes)


class PendingExperts(Protocol):
    """Expert work under way on the worker pool."""

    def wait(self) -> Tensor:
        """Block until done (without the GIL) and return float64 [T, H]. Call once."""
        ...


class ExpertMath(Protocol):
    """The experts of one bank, bound to the kernels of their formats."""

    def __call__(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """sum_k weights[t, k] * expert[ids[t, k]](hidden[t]) over ids >= 0: float64 [T, H].

        hidden_states float32 [T, H], topk_weights float32 [T, K], topk_ids int32 [T, K]. An id of
        -1 is skipped, as is a weight of exactly zero. Each term is rounded to float32, and terms
        are added in float64, where a sum of a handful of float32 numbers is exact unless they lie
        more than 2^25 apart. So calls that share the routes of a token, however divided, add up to
        the bits of one call with all of them, and the layer rounds to float32 once.
        """
        ...


class ExpertKernel(ExpertMath, Protocol):
    """Experts on the CPU, which can also be computed beside the caller's work."""

    def submit(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> PendingExperts:
        """The same, on the pool's own threads; returns at once. The inputs must not change
        before `wait`."""
        ...


T = TypeVar("T")

# A fetch cap that is a fraction of the misses is a number of 1/65536: integers, so that the host's
# LRU and the device's round alike.
FRACTION_ONE = 1 << 16


class Recording(Protocol):
    """Operators that ran once, with the arrays they read and wrote. Keeps those alive."""

    def replay(self) -> None:
        """Run them again, in order, on what the arrays hold now."""
        ...


class Ops(Protocol):
    """All operators of one platform."""

    @property
    def device(self) -> torch.device:
        """Where the tensors lie that operators take and return."""
        ...

    @property
    def can_record(self) -> bool:
        """Whether `record` is there."""
        ...

    def record(self, work: Callable[[], T]) -> tuple[T, Recording]:
        """Run `work`, and keep the operators that it calls for a replay: without Python between
        them, and without making their outputs anew. Everything else that `work` does (torch's own
        operators, the choice of arrays) is not replayed. One thread at a time."""
        ...

    @property
    def description(self) -> str:
        """For reports: instruction set or device, e.g. "avx2"."""
        ...

    @property
    def cache_dtype(self) -> torch.dtype:
        """What keys and values are stored as."""
        ...

    @property
    def threads(self) -> int:
        """Host threads that the operators compute on; 0 for a GPU's."""
        ...

    def matrix(self, entry: TensorEntry) -> Matrix:
        """Bind a [N, H] tensor: zero copy on a CPU, else copied to the device. Raises
        CheckpointError for a format without kernel."""
        ...

    def linear(self, x: Tensor, w: Matrix, bias: Tensor | None = None) -> Tensor:
        """x [T, H] @ w [N, H]^T (+ bias [N]) -> [T, N].

        A CPU rounds x to int8 in blocks of 32 for quantised formats, a GPU x and the weights to
        bfloat16 where there are many tokens; else they multiply exactly.
        """
        ...

    def linear_group(
        self, x: Tensor, matrices: tuple[Matrix, ...], biases: tuple[Tensor | None, ...]
    ) -> list[Tensor]:
        """`linear` of the same x with each matrix and its bias, as one piece of work."""
        ...

    def embed(self, ids: Tensor, w: Matrix) -> Tensor:
        """Dequantised rows: ids int64 [T] -> float32 [T, cols]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension; any leading dimensions."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place, then rms_norm(residual). Both [T, H]."""
        ...

    def gated_activation(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """act(gate) * up, elementwise, [T, I]; what is not finite in either is not in the result.

        Raises CheckpointError for an activation without kernel.
        """
        ...

    def rotary_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
        """Rotate q [T, Hq, D] and k [T, Hk, D] in place by cos, sin [T, R/2], R <= D.

        Pairs are (i, i + R/2), or (2i, 2i + 1) if interleaved; dimensions from R on stay.
        """
        ...

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        """Store k, v [T, Hk, D] at rows `slots` int64 [T] of caches [pages, page_tokens, Hk, D]
        (slot = page * page_tokens + offset)."""
        ...

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
        """Causal attention of every token over the cached tokens of its own sequence.

        q [T, Hq, D]; block_table int32 [S, P]: the pages of each sequence; sequence int32 [T]: the
        row of block_table; positions int32 [T]. Token t sees positions p <= positions[t], and with
        a window only p > positions[t] - window. Query head h reads key head h // (Hq / Hk).
        `sinks` float32 [Hq] is one more logit of each head in the softmax, which takes its share
        and adds no value. Returns [T, Hq, D].
        """
        ...

    def to_float32(self, x: Tensor) -> Tensor:
        """float64 [T, H] rounded to float32."""
        ...

    def route_topk(self, logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
        """Softmax over the experts, then the top_k, largest first (ties: lower id).

        logits float32 [T, E] -> weights float32 [T, K] (summing to 1 if renormalize), ids int32
        [T, K].
        """
        ...
