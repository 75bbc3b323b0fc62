"""The experts of a bank on the GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from freetoken.kernels.triton.activations import kernel_activation
from freetoken.kernels.triton.expert_bank import DeviceBank, DevicePart
from freetoken.kernels.triton.expert_decode import down_kernel, gate_up_kernel, sum_routes_kernel

SUM_BLOCK = 256


def _block_k(cols: int, unit: int) -> int:
    return max(unit, min(1024, triton.next_power_of_2(cols)))


class TritonExpertKernel:
    """freetoken.kernels.base.ExpertKernel, without `submit`, for a bank in the device's memory."""

    def __init__(self, bank: DeviceBank) -> None:
        self._bank = bank
        gate, up, down = bank.gate, bank.up, bank.down
        self._hidden, self._inner = gate.cols, gate.rows
        kind, alpha, limit = kernel_activation(bank.activation)
        shape = {"RECORD_BYTES": bank.records.shape[1], "H": gate.cols, "I": gate.rows}
        self._gate_up: dict[str, Any] = shape | gate.constants("GATE") | up.constants("UP")
        self._gate_up |= {
            "GATE_DOT": gate.kernels.dot,
            "UP_DOT": up.kernels.dot,
            "SAME_FORMAT": gate.format == up.format,
            "ACTIVATION": kind,
            "ALPHA": alpha,
            "LIMIT": limit,
            "ROWS": 4,
            "BLOCK_K": _block_k(gate.cols, max(gate.kernels.unit, up.kernels.unit)),
        }
        self._down: dict[str, Any] = shape | down.constants("DOWN")
        self._down |= {
            "DOWN_DOT": down.kernels.dot,
            "ROWS": 8,
            "BLOCK_K": _block_k(down.cols, down.kernels.unit),
        }

    def __call__(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """See the protocol."""
        tokens, top_k = topk_ids.shape
        routes = tokens * top_k
        hidden, inner = self._hidden, self._inner
        out = torch.empty((tokens, hidden), dtype=torch.float64, device=hidden_states.device)
        if routes == 0:
            return out.zero_()
        records = self._bank.records
        activated = hidden_states.new_empty((routes, inner))
        terms = hidden_states.new_empty((routes, hidden))
        gate_up_kernel[(triton.cdiv(inner, 4), routes)](
            hidden_states, topk_weights, topk_ids, records, activated, TOP_K=top_k, **self._gate_up
        )
        down_kernel[(triton.cdiv(hidden, 8), routes)](
            activated, topk_weights, topk_ids, records, terms, **self._down
        )
        sum_routes_kernel[(triton.cdiv(hidden, SUM_BLOCK), tokens)](
            terms, topk_weights, topk_ids, out, TOP_K=top_k, H=hidden, BLOCK=SUM_BLOCK
        )
        return out
