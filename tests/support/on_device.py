"""Decoders whose experts are all in slots of the device, or of its stand-in, the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.kernels.triton.ops import TritonOps
from freetoken.moe.device_bank import device_bank
from freetoken.moe.runtime import GpuExperts
from support.decoding import Runner
from support.moe_fakes import DeviceMemory


def fused_runner(path: Path, ops: TritonOps, *, sequences: int = 2, tokens: int = 48) -> Runner:
    """A Runner of the strategy fused on those operators."""
    gpu = GpuExperts(
        ops.device,
        bind=lambda layout, records: ops.experts(device_bank(layout, records)),
        cpu_executor=lambda _: pytest.fail("nothing is computed on the CPU"),
    )
    return Runner(
        path,
        ops,
        strategy="fused",
        sequences=sequences,
        tokens=tokens,
        memory=DeviceMemory(),
        gpu=gpu,
    )
