"""Small experts, host memory and kernels for tests of the MoE runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.errors import CapacityError
from freetoken.formats.base import ByteRange, WeightFormat
from freetoken.kernels.activations import Activation
from freetoken.kernels.base import ExpertBank, ExpertPart
from freetoken.moe.store import ExpertTensor, LayerExperts
from freetoken.platforms import gpu_memory
from support.random_weights import random_matrix
from support.reference_ops import ReferenceOps, gated, read_bias, read_expert


@dataclass(frozen=True)
class ToyQuantized(WeightFormat):
    """Blocks of 8: int16 scale in units of 1/1024, then 8 int8 codes."""

    def dequantize(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        blocks = rows.reshape(*rows.shape[:-1], -1, self.block_bytes)
        scales = blocks[..., :2].copy().view(np.int16).astype(np.float32) / 1024
        values = blocks[..., 2:].view(np.int8).astype(np.float32) * scales
        return values.reshape(*rows.shape[:-1], -1)


@dataclass(frozen=True)
class ToyFloat(WeightFormat):
    """Plain float32."""

    def dequantize(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(rows).view(np.float32)


TOY_Q8 = ToyQuantized("TOY_Q8", 8, 10, codes=ByteRange(2, 8), scales=ByteRange(0, 2))
TOY_F32 = ToyFloat("TOY_F32", 1, 4, codes=ByteRange(0, 4), scales=ByteRange(4, 0))


class HostMemory:
    """The allocation side of a platform; `limit_bytes` makes it run out. `placed` remembers the
    banks that were placed: where their codes begin, and whether they were mapped."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self.placed: list[tuple[list[int], bool]] = []

    def allocate(self, size_bytes: int, /) -> npt.NDArray[np.uint8]:
        self.allocated_bytes += size_bytes
        if self.limit_bytes is not None and self.allocated_bytes > self.limit_bytes:
            raise CapacityError(f"no {size_bytes} bytes left")
        memory = np.zeros(size_bytes + 256, np.uint8)
        start = -memory.ctypes.data % 256
        return memory[start : start + size_bytes]

    def place(self, bank: ExpertBank, *, mapped: bool) -> None:
        assert mapped or not any(owner.any() for owner in bank.owners), "placed too late"
        self.placed.append((code_addresses(bank), mapped))

    def allocate_slots(self, size_bytes: int, /) -> torch.Tensor:
        return torch.from_numpy(self.allocate(size_bytes))

    def pin(self, memory: torch.Tensor, /) -> bool:
        return True


def code_addresses(bank: ExpertBank) -> list[int]:
    """Where the codes of gate, up and down of each expert begin, as `HostMemory` remembers them."""
    return [int(start) for part in (bank.gate, bank.up, bank.down) for start in part.codes]


class DeviceMemory(HostMemory):
    """Slots on the GPU where there is one; else in host memory, which the interpreter's kernels
    read. After `refuses_after` calls `pin` says no."""

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def __init__(self, limit_bytes: int | None = None, refuses_after: int | None = None) -> None:
        super().__init__(limit_bytes)
        self.refuses_after = refuses_after
        self.pinned_bytes = 0

    def allocate_slots(self, size_bytes: int, /) -> torch.Tensor:
        if self.device.type == "cpu":
            return super().allocate_slots(size_bytes)
        return gpu_memory.allocate_slots(size_bytes, self.device)

    def pin(self, memory: torch.Tensor, /) -> bool:
        if self.refuses_after is not None:
            self.refuses_after -= 1
            if self.refuses_after < 0:
                return False
        self.pinned_bytes += memory.nbytes
        return self.device.type == "cpu" or gpu_memory.pin(memory)


def random_tensor(
    rng: np.random.Generator,
    name: str,
    fmt: WeightFormat,
    rows: int,
    cols: int,
    experts: int,
    *,
    biased: bool = False,
) -> ExpertTensor:
    """Random weights of about 0.1, in any format."""
    make = _toy_matrix if fmt in (TOY_Q8, TOY_F32) else random_matrix
    matrices, planes = zip(*(make(rng, fmt, rows, cols) for _ in range(experts)), strict=True)
    scales = () if planes[0] is None else planes
    biases = rng.normal(0, 0.1, (experts, rows)).astype(np.float32) if biased else None
    return ExpertTensor(name, fmt, rows, cols, matrices, scales, biases=biases)


def _toy_matrix(
    rng: np.random.Generator, fmt: WeightFormat, rows: int, cols: int
) -> tuple[npt.NDArray[np.uint8], None]:
    if fmt is TOY_F32:
        return rng.normal(0, 0.1, (rows, cols)).astype(np.float32).view(np.uint8), None
    data = rng.integers(0, 256, (rows, fmt.row_bytes(cols)), dtype=np.uint8)
    blocks = data.reshape(-1, fmt.block_bytes)
    blocks[:, :2] = rng.integers(1, 4, (len(blocks), 1), dtype=np.int16).view(np.uint8)
    return data, None


def random_layer(
    layer_id: int,
    experts: int,
    *,
    hidden: int = 16,
    intermediate: int = 8,
    formats: Sequence[WeightFormat] = (TOY_Q8, TOY_Q8, TOY_Q8),
    seed: int = 0,
    activation: Activation = "silu",
    biased: bool = False,
) -> LayerExperts:
    """One MoE layer with random experts; formats of gate, up and down."""
    rng = np.random.default_rng([seed, layer_id])
    gate, up, down = formats
    return LayerExperts(
        layer_id,
        random_tensor(rng, "gate", gate, intermediate, hidden, experts, biased=biased),
        random_tensor(rng, "up", up, intermediate, hidden, experts, biased=biased),
        random_tensor(rng, "down", down, hidden, intermediate, experts, biased=biased),
        activation,
    )


def random_routes(
    rng: np.random.Generator, tokens: int, experts: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """Weights float32 [T, K] that sum to 1 and distinct ids int32 [T, K]."""
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    weights = rng.dirichlet(np.ones(top_k), tokens).astype(np.float32)
    return torch.from_numpy(weights), torch.from_numpy(ids)


class OrderedKernel:
    """The ExpertKernel contract to the letter: float32 terms, added in float64 in order of k."""

    def __init__(self, bank: ExpertBank) -> None:
        self.bank = bank

    def __call__(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states, dtype=torch.float64)
        for token in range(len(hidden_states)):
            for weight, expert in zip(topk_weights[token], topk_ids[token].tolist(), strict=True):
                if expert >= 0 and weight != 0:
                    term = weight * self._expert(expert, hidden_states[token])
                    out[token] += term.double()
        return out

    def submit(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> DeferredExperts:
        return DeferredExperts(self, (hidden_states, topk_weights, topk_ids))

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        bank = self.bank

        def product(part: ExpertPart, inputs: Tensor) -> Tensor:
            return read_expert(part, expert).double() @ inputs + read_bias(part, expert)

        wide = x.double()
        inner = gated(bank.activation, product(bank.gate, wide), product(bank.up, wide))
        return product(bank.down, inner).float()


class DeferredExperts:
    """Work that is done when waited for: inputs that change meanwhile would show."""

    def __init__(self, kernel: OrderedKernel, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        self._kernel = kernel
        self._inputs = inputs

    def wait(self) -> Tensor:
        return self._kernel(*self._inputs)


class OrderedOps(ReferenceOps):
    """Reference operators with OrderedKernel as expert kernel."""

    def expert_kernel(self, bank: ExpertBank) -> OrderedKernel:  # type: ignore[override]
        return OrderedKernel(bank)
