"""freetoken.kernels.base.Ops on a GPU, or under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from freetoken.checkpoints.base import TensorEntry
from freetoken.kernels.activations import Activation
from freetoken.kernels.base import Matrix, Recording
from freetoken.kernels.triton import attention, elementwise, linear, norm, rotary, routing
from freetoken.kernels.triton.expert_bank import DeviceBank
from freetoken.kernels.triton.experts import ExpertScratch, TritonExpertKernel
from freetoken.kernels.triton.formats import TRITON_FORMATS
from freetoken.kernels.triton.matrix import TritonMatrix

T = TypeVar("T")


class TritonOps:
    """The operators of one device. They only launch kernels: no value is read on the host, so all
    can be captured in a graph.

    A result does not depend on the other tokens of a call, but on which kernel computes it: a few
    tokens are multiplied with weights in float32, many in bfloat16 (see `linear`), and the
    attention of a decode step adds in another order than that of a prefill (see `attention`).
    """

    def __init__(
        self, device: torch.device | str, cache_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._device = torch.empty(0, device=device).device  # with its number
        self._cache_dtype = cache_dtype
        self._scratch = ExpertScratch.on(self._device)  # of all layers, which run in turn

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def cache_dtype(self) -> torch.dtype:
        return self._cache_dtype

    @property
    def description(self) -> str:
        if self._device.type == "cpu":
            return "Triton interpreter"
        return torch.cuda.get_device_name(self._device)

    @property
    def threads(self) -> int:
        """Zero: the operators need no host threads of their own."""
        return 0

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the weight formats that have kernels."""
        return tuple(TRITON_FORMATS)

    @property
    def can_record(self) -> bool:
        return False

    def record(self, work: Callable[[], T]) -> tuple[T, Recording]:
        raise RuntimeError(
            "the GPU's operators do not record; capture a graph of the device instead (can_record)"
        )

    def matrix(self, entry: TensorEntry) -> TritonMatrix:
        return TritonMatrix.of(entry, self._device)

    def experts(self, bank: DeviceBank) -> TritonExpertKernel:
        """What computes a bank's experts. All kernels of these operators share their scratch
        memory: bind them before the first graph is captured."""
        return TritonExpertKernel(bank, self._scratch)

    def linear(self, x: Tensor, w: Matrix, bias: Tensor | None = None) -> Tensor:
        return linear.linear(x, _bound(w), bias)

    def linear_group(
        self, x: Tensor, matrices: tuple[Matrix, ...], biases: tuple[Tensor | None, ...]
    ) -> list[Tensor]:
        return linear.linear_group(x, _bound(matrices), biases)

    def embed(self, ids: Tensor, w: Matrix) -> Tensor:
        return elementwise.embed(ids, _bound(w))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.add_rms_norm(x, residual, weight, eps)

    def gated_activation(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return elementwise.gated_activation(gate, up, activation)

    def rotary_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
        rotary.rotary_(q, k, cos, sin, interleaved=interleaved)

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        rotary.write_kv(k, v, k_cache, v_cache, slots)

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
        return attention.paged_attention(
            q,
            k_cache,
            v_cache,
            block_table,
            sequence,
            positions,
            scale=scale,
            window=window,
            sinks=sinks,
        )

    def to_float32(self, x: Tensor) -> Tensor:
        return x.to(torch.float32)

    def route_topk(self, logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
        return routing.route_topk(logits, top_k, renormalize=renormalize)


def _bound(w: Matrix | tuple[Matrix, ...]) -> Any:
    """`Ops` takes any platform's Matrix; these are given their own alone."""
    return w
