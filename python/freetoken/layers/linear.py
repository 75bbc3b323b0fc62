"""A weight matrix with its bias."""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.base import Matrix, Ops


class Linear:
    """x [T, cols] -> x @ weight^T (+ bias) [T, rows]."""

    def __init__(self, ops: Ops, weight: Matrix, bias: Tensor | None = None) -> None:
        self._ops = ops
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.weight, self.bias)


class LinearGroup:
    """Several linear layers of one input: x [T, cols] -> [T, rows] of each."""

    def __init__(self, ops: Ops, *layers: Linear) -> None:
        self._ops = ops
        self._weights = tuple(layer.weight for layer in layers)
        self._biases = tuple(layer.bias for layer in layers)

    def __call__(self, x: Tensor) -> list[Tensor]:
        return self._ops.linear_group(x, self._weights, self._biases)
