"""The operators once more, in plain torch: what every platform's kernels are compared with.

Arithmetic is float64 inside and rounded to float32 at the end, one token at a time, so a token's
result does not depend on its batch. Slow; meant for tiny models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.checkpoints.base import TensorEntry
from freetoken.formats.base import WeightFormat
from freetoken.kernels.activations import Activation, ClampedSwiGlu
from freetoken.kernels.base import ExpertBank, ExpertPart, Recording

T = TypeVar("T")

INT8_BLOCK = 32
FP8_BLOCK = 128


def int8_rounded(x: Tensor) -> Tensor:
    """What is left of x [T, H] after int8 activations: q * d per block of 32, d = max|x| / 127."""
    blocks = x.float().reshape(x.shape[0], -1, INT8_BLOCK)
    d = blocks.abs().amax(dim=-1, keepdim=True) / 127.0
    q = torch.where(d == 0, 0.0, blocks / d).round().clamp(-127, 127)
    return (q.double() * d.double()).reshape(x.shape)


def fp8_rounded(x: Tensor) -> Tensor:
    """What is left of x [T, H] after DeepSeek's FP8 round trip: e4m3 with a power of two as scale
    for each 128 columns, the smallest that keeps them within 448."""
    out = torch.empty_like(x)
    for start in range(0, x.shape[-1], FP8_BLOCK):
        block = x[:, start : start + FP8_BLOCK]
        largest = block.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
        quotient = (largest * np.float32(1 / 448)).double()
        scale = torch.exp2(torch.ceil(torch.log2(quotient))).float()
        rounded = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        out[:, start : start + FP8_BLOCK] = rounded * scale
    return out


def multiplied(x: Tensor, fmt: WeightFormat, int8: bool) -> Tensor:
    """What weights of a format are multiplied with in place of x [T, H]: float64 [T, H]."""
    if fmt.name == "DS_FP4":
        x = fp8_rounded(x)
    if int8 and fmt.block_elements > 1:
        return int8_rounded(x)
    return x.double()


def gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up in float64."""
    gate, up = gate.double(), up.double()
    if isinstance(activation, ClampedSwiGlu):
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    if activation == "relu2":
        return torch.relu(gate).square() * up
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}[activation]
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def bytes_at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    """A strided view of memory that somebody else keeps alive."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(address))
    return np.lib.stride_tricks.as_strided(memory, shape, strides, writeable=False)


def read_expert(part: ExpertPart, expert: int) -> Tensor:
    """One expert's part [rows, cols] as float64, from wherever its addresses point."""
    fmt = part.format
    blocks = part.cols // fmt.block_elements
    codes = bytes_at(
        int(part.codes[expert]),
        (part.rows, blocks, fmt.codes.bytes),
        (part.code_row_stride_bytes, part.code_block_stride_bytes, 1),
    )
    scale_rows, scale_row_bytes = fmt.scale_plane(part.rows, part.cols)
    scales = np.zeros((scale_rows, 0), np.uint8)
    if scale_row_bytes:
        scales = bytes_at(
            int(part.scales[expert]),
            (scale_rows, scale_row_bytes // fmt.scales.bytes, fmt.scales.bytes),
            (part.scale_row_stride_bytes, part.scale_block_stride_bytes, 1),
        )
    factor = np.float32(1)
    if part.factors is not None:
        factor = bytes_at(int(part.factors[expert]), (4,), (1,)).view(np.float32)[0]
    numbers = fmt.dequantize_planes(
        codes.reshape(part.rows, -1), scales.reshape(scale_rows, scale_row_bytes), factor
    )
    return torch.from_numpy(np.ascontiguousarray(numbers)).double()


def read_bias(part: ExpertPart, expert: int) -> Tensor:
    """One expert's bias [rows] as float64; zeros where the part has none."""
    if part.biases is None:
        return torch.zeros(part.rows, dtype=torch.float64)
    data = bytes_at(int(part.biases[expert]), (part.rows, 4), (4, 1))
    return torch.from_numpy(data.copy().view(np.float32).reshape(-1)).double()


Parts = tuple[tuple[Tensor, Tensor], ...]  # weights and bias of gate, up and down


@dataclass(frozen=True)
class ReferenceMatrix:
    """A dequantised weight matrix, float64 [rows, cols]."""

    format: WeightFormat
    weight: Tensor

    @property
    def rows(self) -> int:
        return int(self.weight.shape[0])

    @property
    def cols(self) -> int:
        return int(self.weight.shape[1])


class FinishedExperts:
    """A PendingExperts whose work is already done. Holds callers to the single wait."""

    def __init__(self, result: Tensor) -> None:
        self._result: Tensor | None = result

    def wait(self) -> Tensor:
        result = self._result
        assert result is not None, "wait() was called twice on the same expert work"
        self._result = None
        return result


class ReferenceExpertKernel:
    """Experts of a bank. Reads the bank's memory on every call, as slots change between calls."""

    def __init__(self, bank: ExpertBank, int8_activations: bool) -> None:
        self._bank = bank
        self._int8 = int8_activations

    def __call__(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        tokens, top_k = topk_ids.shape
        assert hidden_states.shape[0] == tokens and topk_weights.shape == topk_ids.shape
        assert topk_ids.dtype == torch.int32, topk_ids.dtype
        assert bool((topk_ids < self._bank.experts).all()), "an id beyond the bank's experts"
        experts: dict[int, Parts] = {}
        out = torch.zeros(hidden_states.shape, dtype=torch.float64)
        for t in range(tokens):
            for k in range(top_k):
                expert = int(topk_ids[t, k])
                if expert < 0 or topk_weights[t, k] == 0.0:
                    continue
                if expert not in experts:
                    experts[expert] = self._read(expert)
                term = topk_weights[t, k] * self._mlp(experts[expert], hidden_states[t]).float()
                out[t] += term.double()
        return out

    def submit(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> FinishedExperts:
        return FinishedExperts(self(hidden_states, topk_weights, topk_ids))

    def _read(self, expert: int) -> Parts:
        bank = self._bank
        return tuple(
            (read_expert(part, expert), read_bias(part, expert))
            for part in (bank.gate, bank.up, bank.down)
        )

    def _mlp(self, parts: Parts, x: Tensor) -> Tensor:
        (gate, gate_bias), (up, up_bias), (down, down_bias) = parts
        bank = self._bank
        inner = gated(
            bank.activation,
            gate @ self._activations(bank.gate, x) + gate_bias,
            up @ self._activations(bank.up, x) + up_bias,
        ).float()
        return down @ self._activations(bank.down, inner) + down_bias

    def _activations(self, part: ExpertPart, x: Tensor) -> Tensor:
        return multiplied(x[None], part.format, self._int8)[0]


class ReferenceOps:
    """freetoken.kernels.base.Ops. `int8_activations` makes products with quantised weights round
    the activations to int8 blocks first, as the kernels do; without it they multiply exactly."""

    device = torch.device("cpu")
    cache_dtype = torch.float32
    description = "reference"
    threads = 1
    can_record = False

    def record(self, work: Callable[[], T]) -> tuple[T, Recording]:
        raise AssertionError("the reference does not record")

    def __init__(self, int8_activations: bool = False) -> None:
        self._int8 = int8_activations

    def matrix(self, entry: TensorEntry) -> ReferenceMatrix:
        assert len(entry.shape) == 2, f"{entry.name}: {entry.shape} is no matrix"
        return ReferenceMatrix(entry.format, torch.tensor(entry.dequantize()).double())

    def expert_kernel(self, bank: ExpertBank) -> ReferenceExpertKernel:
        return ReferenceExpertKernel(bank, self._int8)

    def linear(self, x: Tensor, w: ReferenceMatrix, bias: Tensor | None = None) -> Tensor:
        assert x.dtype == torch.float32 and x.shape[1] == w.cols, (x.dtype, x.shape, w.cols)
        inputs = multiplied(x, w.format, self._int8)
        out = torch.empty(x.shape[0], w.rows, dtype=torch.float64)
        for t in range(x.shape[0]):
            out[t] = torch.mv(w.weight, inputs[t].clone())
        if bias is not None:
            out += bias.double()
        return out.float()

    def linear_group(
        self,
        x: Tensor,
        matrices: tuple[ReferenceMatrix, ...],
        biases: tuple[Tensor | None, ...],
    ) -> list[Tensor]:
        return [self.linear(x, w, bias) for w, bias in zip(matrices, biases, strict=True)]

    def embed(self, ids: Tensor, w: ReferenceMatrix) -> Tensor:
        assert ids.dtype == torch.int64, ids.dtype
        return w.weight[ids].float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = x.double()
        scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
        return (exact * scale * weight.double()).float()

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def gated_activation(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return gated(activation, gate, up).float()

    def rotary_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
        for x in (q, k):
            _rotate_(x, cos.double()[:, None], sin.double()[:, None], interleaved)

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        for new, cache in ((k, k_cache), (v, v_cache)):
            cache.view(-1, *cache.shape[2:])[slots] = new

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
        group = q.shape[1] // k_cache.shape[2]
        page_tokens = k_cache.shape[1]
        out = torch.zeros(q.shape, dtype=torch.float32)
        for t in range(q.shape[0]):
            if sequence[t] < 0:
                continue
            last = int(positions[t])
            first = 0 if window is None else max(0, last - window + 1)
            seen = torch.arange(first, last + 1)
            pages = block_table[int(sequence[t])].long()[seen // page_tokens]
            keys = k_cache[pages, seen % page_tokens].double().repeat_interleave(group, dim=1)
            values = v_cache[pages, seen % page_tokens].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,phd->hp", q[t].double(), keys) * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            shares = scores.softmax(dim=-1)[:, : len(seen)]
            out[t] = torch.einsum("hp,phd->hd", shares, values).float()
        return out

    def to_float32(self, x: Tensor) -> Tensor:
        return x.to(torch.float32)

    def route_topk(self, logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
        order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = logits.double().softmax(dim=-1).gather(1, order)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.float(), order.to(torch.int32)


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate x [T, heads, D] in place by cos, sin [T, 1, R/2]."""
    half = cos.shape[-1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].double(), x[..., second].double()
    x[..., first] = (a * cos - b * sin).float()
    x[..., second] = (b * cos + a * sin).float()
