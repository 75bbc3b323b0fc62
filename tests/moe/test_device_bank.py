"""What GPU kernels are told of records: they read from them what the reference reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from freetoken.formats import by_name
from freetoken.kernels.triton.expert_bank import NONE
from freetoken.kernels.triton.experts import TritonExpertKernel
from freetoken.moe.device_bank import device_bank
from freetoken.moe.store import PackedExpertStore, SlotPool
from support.moe_fakes import DeviceMemory, HostMemory, OrderedKernel, random_layer, random_routes


@pytest.mark.parametrize(
    ("names", "with_factors", "biased"),
    [
        (("Q4_0", "Q8_0", "Q4_0"), False, False),
        (("NVFP4", "NVFP4", "BF16"), True, False),
        (("MXFP4", "MXFP4", "MXFP4"), False, True),
    ],
)
def test_a_gpu_kernel_on_slots_computes_what_the_reference_computes(
    names: tuple[str, ...], with_factors: bool, biased: bool
) -> None:
    formats = [by_name(name) for name in names]
    layer = random_layer(0, 4, hidden=64, intermediate=64, formats=formats, biased=biased)
    if with_factors:
        factors = np.array([0.5, 1.5, 2.0, 0.75], np.float32)
        layer = replace(layer, gate=replace(layer.gate, factors=factors))
    memory = DeviceMemory()
    store, pool = PackedExpertStore([layer], memory), SlotPool(memory, [layer], 3)
    for slot, expert in enumerate((3, 1, 2)):
        pool.fill(0, slot, store.records(0)[expert])
    bank = device_bank(pool.layouts[0], pool.records(0))
    assert bank.experts == 3 and bank.records is pool.records(0)
    assert (bank.gate.factor != NONE) == with_factors and bank.up.factor == NONE
    assert (bank.down.bias != NONE) == biased

    rng = np.random.default_rng(0)
    hidden = torch.from_numpy(rng.normal(size=(2, 64)).astype(np.float32))
    weights, slots = random_routes(rng, 2, 3, 2)
    slots[1], weights[1] = -1, 0.0
    on_device = (tensor.to(DeviceMemory.device) for tensor in (hidden, weights, slots))
    found = TritonExpertKernel(bank)(*on_device).cpu()
    host = SlotPool(HostMemory(), [layer], 3)
    for slot in range(3):
        host.fill(0, slot, pool.record(0, slot).cpu())
    expected = OrderedKernel(host.bank(0))(hidden, weights, slots)
    assert not found[1].any()
    # Products of float32 numbers, added up over 64 columns in some order.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
