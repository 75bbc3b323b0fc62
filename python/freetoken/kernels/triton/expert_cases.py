"""The expert kernels for cross-compilation: each format in decode and in prefill, and all that
experts of a layer may have besides weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.runtime.jit import JITFunction

from freetoken.formats import FORMATS
from freetoken.kernels.activations import Activation, ClampedSwiGlu
from freetoken.kernels.triton.compile_cases import CompileCase
from freetoken.kernels.triton.expert_bank import DeviceBank, DevicePart
from freetoken.kernels.triton.expert_decode import down_kernel, gate_up_kernel, sum_routes_kernel
from freetoken.kernels.triton.expert_prefill import (
    down_tiles_kernel,
    gate_up_tiles_kernel,
    sort_routes_kernel,
)
from freetoken.kernels.triton.expert_sizes import (
    DECODE_OPTIONS,
    SORT_OPTIONS,
    SORT_ROUTES,
    SUM_COLUMNS,
    SUM_OPTIONS,
    TILE_OPTIONS,
    Constants,
    Options,
    down_constants,
    down_tiles_constants,
    gate_up_constants,
    gate_up_tiles_constants,
)

_TYPES = {
    "x_ptr": "*fp32",
    "inner_ptr": "*fp32",
    "terms_ptr": "*fp32",
    "out_ptr": "*fp64",
    "weights_ptr": "*fp32",
    "ids_ptr": "*i32",
    "starts_ptr": "*i32",
    "counts_ptr": "*i32",
    "order_ptr": "*i32",
    "records_ptr": "*u8",
    "routes": "i32",
}


def example_bank(
    gate: str,
    down: str,
    hidden: int,
    inner: int,
    activation: Activation = "silu",
    up: str | None = None,
    extras: bool = False,
) -> DeviceBank:
    """A bank of formats by name, without memory; `extras`: with factors and biases."""
    offset = 0
    parts = []
    for name, rows, cols in (
        (gate, inner, hidden),
        (up or gate, inner, hidden),
        (down, hidden, inner),
    ):
        part = DevicePart(FORMATS[name], rows, cols, offset, offset + 4 * rows * cols)
        offset += 8 * rows * cols
        if extras:
            part = replace(part, factor=offset, bias=offset + 256)
            offset += 256 + 4 * rows
        parts.append(part)
    records = torch.empty((128, offset), dtype=torch.uint8, device="meta")
    return DeviceBank(records, parts[0], parts[1], parts[2], activation)


def _case(name: str, kernel: JITFunction, constants: Constants, options: Options) -> CompileCase:
    arguments = [argument for argument in kernel.arg_names if argument not in constants]
    types = dict(_TYPES)
    if name.startswith("prefill"):
        types |= {"x_ptr": "*bf16", "inner_ptr": "*bf16"}
    return CompileCase(
        name, kernel, {argument: types[argument] for argument in arguments}, constants, options
    )


def _gate_up(name: str, bank: DeviceBank) -> CompileCase:
    constants = {**gate_up_constants(bank), "TOP_K": 8}
    return _case(f"decode gate_up {name}", gate_up_kernel, constants, DECODE_OPTIONS)


def _down(name: str, bank: DeviceBank) -> CompileCase:
    return _case(f"decode down {name}", down_kernel, down_constants(bank), DECODE_OPTIONS)


def _gate_up_tiles(name: str, bank: DeviceBank, size: int) -> CompileCase:
    constants = {**gate_up_tiles_constants(bank), "TOP_K": 8, "BM": size}
    label = f"prefill gate_up {name} {size}"
    return _case(label, gate_up_tiles_kernel, constants, TILE_OPTIONS[size])


def _down_tiles(name: str, bank: DeviceBank, size: int) -> CompileCase:
    constants = {**down_tiles_constants(bank), "BM": size}
    return _case(f"prefill down {name} {size}", down_tiles_kernel, constants, TILE_OPTIONS[size])


def _cases() -> list[CompileCase]:
    cases = [
        _case(
            "sum_routes",
            sum_routes_kernel,
            {"TOP_K": 8, "H": 2880, "BLOCK": SUM_COLUMNS},
            SUM_OPTIONS,
        ),
        _case("sort_routes", sort_routes_kernel, {"BLOCK": SORT_ROUTES}, SORT_OPTIONS),
    ]
    for name in FORMATS:
        if name != "DS_FP4":  # the kernels of MXFP4_PAIRS
            bank = example_bank(name, name, 2048, 768)
            cases += [_down(name, bank), _down_tiles(name, bank, 64)]
    gpt_oss = example_bank("MXFP4_PAIRS", "MXFP4_PAIRS", 2880, 2880, ClampedSwiGlu(), extras=True)
    mixed = example_bank("Q4_K", "Q6_K", 2048, 768, "gelu", up="Q6_K")
    short = example_bank("NVFP4_PAIRS", "FP8_128", 2064, 1408 + 8, "gelu_tanh", extras=True)
    q4_k = example_bank("Q4_K", "Q6_K", 4096, 1536)
    cases += [_gate_up("gpt-oss", gpt_oss), _gate_up_tiles("gpt-oss", gpt_oss, 16)]
    cases += [_gate_up("mixed", mixed), _gate_up_tiles("mixed", mixed, 128)]
    cases += [_gate_up("short", short), _down("short", short)]
    cases += [_gate_up("Q4_K", q4_k), _gate_up_tiles("Q4_K", q4_k, 64)]
    return cases


COMPILE_CASES = _cases()
