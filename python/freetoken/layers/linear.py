"""A weight matrix with its bias."""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.base import Matrix, Ops


class Linear:
    """x [T, cols] -> x @ weight^T (+ bias) [T, rows]."""

    def __init__(self, ops: Ops, weight: Matrix, bias: Tensor | None = None) -> None:
        self._ops = ops
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._weight, self._bias)
