"""Sizes of the expert kernels, and their constants for a bank.

Reasoned for a GPU of 132 multiprocessors and 4.8 TB/s (H200), not yet measured:

- Decode needs bytes under way: 4.8 TB/s times a microsecond of latency are 36 KB for each
  multiprocessor. A program is one warp, which nothing has to wait for, and reads 8 rows at a time,
  16 bytes of each a thread: 4 KB under way. It has 50 to 180 registers a thread, by the format, so
  that at least 11 programs fit. With 8 rows, each number of x that a thread has fetched is used 8
  times. A token with 8 routes to experts of 768 x 2048 makes 1536 programs of the first kernel.
- Prefill's tiles have 64 rows of weights and about as many tokens as an expert may expect:
  dequantising a number costs as much time as some 100 products on tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from freetoken.kernels.triton.activations import kernel_activation
from freetoken.kernels.triton.expert_bank import DeviceBank, DevicePart
from freetoken.kernels.triton.products import FUSED

Constants = dict[str, Any]
Options = dict[str, Any]

# Up to so many routes each reads its expert's weights by itself. More of them would often meet at
# one expert, whose weights prefill reads once for all.
DECODE_ROUTES = 64
DECODE_LANES = 32  # threads of a row, each with a unit of columns
DECODE_OPTIONS: Options = {"num_warps": 1, **FUSED}

SUM_COLUMNS = 256  # of a program that adds up
SUM_OPTIONS: Options = {"num_warps": 4}

SORT_ROUTES = 2048  # that a program looks at together
SORT_OPTIONS: Options = {"num_warps": 8}

TILE_COLUMNS = 64  # of the results of a tile in prefill
TILE_OPTIONS: dict[int, Options] = {
    size: {"num_warps": 8 if size == 128 else 4, "num_stages": 2, **FUSED} for size in (16, 64, 128)
}


@dataclass(frozen=True)
class Sizes:
    """What depends on how many registers programs have: rows that one of decode reads at a time,
    and how many routes a tile of prefill may have, ascending."""

    decode_rows: int
    tile_routes: tuple[int, ...]

    def tile(self, routes: int, experts: int) -> int:
        """Sorted routes of a tile in prefill: about as many as an expert may expect."""
        expected = routes // experts
        return next((size for size in self.tile_routes if expected <= size), self.tile_routes[-1])


MANY_REGISTERS = Sizes(decode_rows=8, tile_routes=(16, 64, 128))
# RDNA: 32 threads a warp, of 256 registers, and a compiler that fetches more at once than fits.
FEW_REGISTERS = Sizes(decode_rows=4, tile_routes=(16, 64))


def sizes_for(device: torch.device) -> Sizes:
    """What suits a device."""
    if torch.version.hip and torch.cuda.get_device_properties(device).warp_size == 32:
        return FEW_REGISTERS
    return MANY_REGISTERS


def decode_block_k(cols: int, unit: int) -> int:
    """Columns of a step of a row: what 32 threads read at once, or half, if that leaves fewer of
    them idle in the last step."""
    whole = min(DECODE_LANES * unit, max(unit, triton.next_power_of_2(cols)))
    candidates = [size for size in (whole, whole // 2) if size >= unit]
    return min(candidates, key=lambda size: -(-cols // size) * size)


def most_tiles(routes: int, experts: int, size: int) -> int:
    """No division of routes among experts has more tiles."""
    return routes // size + min(routes, experts)


def gate_up_constants(bank: DeviceBank, sizes: Sizes) -> Constants:
    """Of `gate_up_kernel`, but for TOP_K."""
    gate, up = bank.gate, bank.up
    together = gate.format == up.format and gate.whole_units
    return {
        **_shape(bank),
        **_activation(bank),
        **_decode_part("GATE", gate),
        **_decode_part("UP", up),
        "TOGETHER": together,
        "ROWS": sizes.decode_rows // 2,
        "BLOCK_K": _decode_step(gate, up),
    }


def down_constants(bank: DeviceBank, sizes: Sizes) -> Constants:
    """Of `down_kernel`."""
    return {
        **_shape(bank),
        **_decode_part("DOWN", bank.down),
        "ROWS": sizes.decode_rows,
        "BLOCK_K": _decode_step(bank.down),
    }


def gate_up_tiles_constants(bank: DeviceBank) -> Constants:
    """Of `gate_up_tiles_kernel`, but for TOP_K and BM."""
    gate, up = bank.gate, bank.up
    return {
        **_shape(bank),
        **_experts(bank),
        **_activation(bank),
        **gate.planes("GATE"),
        **up.planes("UP"),
        "GATE_TILE": gate.kernels.tile,
        "UP_TILE": up.kernels.tile,
        "BN": TILE_COLUMNS,
        "BK": _tile_step(gate, up),
    }


def down_tiles_constants(bank: DeviceBank) -> Constants:
    """Of `down_tiles_kernel`, but for BM."""
    return {
        **_shape(bank),
        **_experts(bank),
        **bank.down.planes("DOWN"),
        "DOWN_TILE": bank.down.kernels.tile,
        "BN": TILE_COLUMNS,
        "BK": _tile_step(bank.down),
    }


def _shape(bank: DeviceBank) -> Constants:
    return {"RECORD_BYTES": bank.records.shape[1], "H": bank.gate.cols, "I": bank.gate.rows}


def _experts(bank: DeviceBank) -> Constants:
    return {"EXPERTS": bank.experts, "PADDED": triton.next_power_of_2(bank.experts)}


def _activation(bank: DeviceBank) -> Constants:
    kind, alpha, limit = kernel_activation(bank.activation)
    return {"ACTIVATION": kind, "ALPHA": alpha, "LIMIT": limit}


def _decode_part(prefix: str, part: DevicePart) -> Constants:
    kernels = part.kernels
    return {
        **part.planes(prefix),
        f"{prefix}_DOT": kernels.dot,
        f"{prefix}_TILE": kernels.tile,
        f"{prefix}_SCALE_ROWS": kernels.scale_rows,
        f"{prefix}_WHOLE_UNITS": part.whole_units,
    }


def _decode_step(*parts: DevicePart) -> int:
    """Columns that a program goes through at a time, in all of the parts, which are as wide: what
    suits the widest, unless that is more than the `tile` of one takes. `dot` takes any."""
    step = max(_wanted_step(part) for part in parts)
    return min([step, *(part.kernels.most_block_k for part in parts if not part.whole_units)])


def _wanted_step(part: DevicePart) -> int:
    step = decode_block_k(part.cols, part.kernels.unit)
    return step if part.whole_units else max(step, part.kernels.least_block_k)


def _tile_step(*parts: DevicePart) -> int:
    """The same for tensor cores, where every part is read by its `tile`."""
    most = min(part.kernels.most_block_k for part in parts)
    return min(max(part.kernels.block_k for part in parts), most)
