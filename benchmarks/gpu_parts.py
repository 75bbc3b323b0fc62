"""What decode and prefill are made of: bandwidths, expert kernels, fetches, prefill."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gpu_device import Device
from gpu_models import Geometry, distinct_experts, expert_bytes, uniform_routes

from freetoken.bench.memory import huge_buffer, pool_bytes, read_gbps
from freetoken.kernels.base import ExpertMath
from freetoken.kernels.cpu import CpuOps
from freetoken.kernels.triton.copy import copy_fetched
from freetoken.kernels.triton.lru import COUNT, LruState
from freetoken.moe.runtime import OffloadMoeRuntime
from freetoken.moe.store import LayerExperts
from freetoken.moe.strategies import ExpertStrategy

_ROUTE_SETS = 5


@dataclass(frozen=True)
class PartsEffort:
    """Sizes and repetitions. Bytes for the bandwidths of the GPU, of the bus, and of the host
    (None: several times what its caches hold)."""

    gpu_bytes: int = 2 << 30
    bus_bytes: int = 256 << 20
    host_bytes: int | None = None
    repeats: int = 9
    kernel_tokens: Sequence[int] = (1, 8, 32)
    kernel_repeats: int = 10
    prefill_tokens: Sequence[int] = (512, 2048)
    cpu_prefill_tokens: int = 512  # at most
    prefill_s: float = 0.3  # after which no further run is begun


def bandwidths(device: Device, cpu_ops: CpuOps, effort: PartsEffort) -> dict[str, float]:
    """GB/s (10^9 bytes) of a plain reduction on the GPU, of the bus from pinned memory, and of
    reading host memory with all threads. Medians."""
    read_s = _read_seconds(device, effort)
    target = torch.zeros(effort.bus_bytes, dtype=torch.uint8, device=device.device)
    source = torch.ones(effort.bus_bytes, dtype=torch.uint8)
    if device.device.type == "cuda":
        source = source.pin_memory()
    copy_s = _median_seconds(
        device, lambda: target.copy_(source, non_blocking=True), effort.repeats
    )
    return {
        "gpu_read_gbps": effort.gpu_bytes / read_s * 1e-9,
        "bus_gbps": effort.bus_bytes / copy_s * 1e-9,
        "host_read_gbps": _host_gbps(cpu_ops, effort),
    }


def _host_gbps(cpu_ops: CpuOps, effort: PartsEffort) -> float:
    buffer = huge_buffer(effort.host_bytes or pool_bytes())
    buffer[:] = 1  # pages that were never written would all be one page of zeros
    return statistics.median(read_gbps(cpu_ops, buffer) for _ in range(effort.repeats + 1))


def _read_seconds(device: Device, effort: PartsEffort) -> float:
    numbers = torch.ones(effort.gpu_bytes // 4, device=device.device)
    return _median_seconds(device, lambda: torch.sum(numbers), effort.repeats)


def _median_seconds(device: Device, work: Callable[[], object], repeats: int) -> float:
    def run() -> None:
        work()

    device.seconds(run, 2)
    return statistics.median(device.seconds(run, 1) for _ in range(repeats))


def kernel_speeds(
    geometry: Geometry,
    fused: OffloadMoeRuntime,
    layer: LayerExperts,
    gpu_read_gbps: float,
    device: Device,
    effort: PartsEffort,
) -> list[dict[str, Any]]:
    """The expert kernels of all layers in one graph, everything resident, routes uniform. `gbps`
    counts each distinct expert of a layer once; `floor` is their bytes at the read bandwidth."""
    layers = len(fused.experts)
    kernels = [fused.slot_kernel(layer_id) for layer_id in range(layers)]
    results = []
    for tokens in effort.kernel_tokens:
        routes = uniform_routes(geometry, steps=_ROUTE_SETS, layers=layers, tokens=tokens)
        layer_s = _kernel_seconds(geometry, kernels, routes, device, effort)
        read = expert_bytes(layer) * distinct_experts(routes)
        floor_s = read / (gpu_read_gbps * 1e9)
        results.append(
            {
                "model": geometry.name,
                "tokens": tokens,
                "mb_per_layer": read * 1e-6,
                "layer_us": layer_s * 1e6,
                "floor_us": floor_s * 1e6,
                "gbps": read / layer_s * 1e-9,
                "fraction": floor_s / layer_s,
            }
        )
    return results


def _kernel_seconds(
    geometry: Geometry,
    kernels: Sequence[ExpertMath | None],
    routes: np.ndarray,
    device: Device,
    effort: PartsEffort,
) -> float:
    """Seconds of a layer: the median over sets of routes."""
    tokens = routes.shape[2]
    sets = torch.from_numpy(routes).to(device.device)
    ids = sets[0].clone()
    hidden = torch.randn(tokens, geometry.hidden, device=device.device)
    weights = torch.full((tokens, geometry.top_k), 1 / geometry.top_k, device=device.device)

    def step() -> None:
        for kernel, at in zip(kernels, ids, strict=True):
            assert kernel is not None
            kernel(hidden, weights, at)

    step()
    graph = device.capture(step)
    graph.replay()
    seconds = []
    for one in sets:
        ids.copy_(one)
        seconds.append(device.seconds(graph.replay, effort.kernel_repeats))
    device.synchronize()
    graph.close()
    return statistics.median(seconds) / len(kernels)


def fetch_speeds(runtime: OffloadMoeRuntime, device: Device) -> dict[str, float]:
    """GB/s of the kernel that brings records from pinned memory into slots, by how many records it
    brings at once. Overwrites slots of layer 0: not for a runtime that goes on."""
    assert runtime.store is not None and runtime.pool is not None
    records, slots = runtime.store.records(0), runtime.pool.records(0)  # type: ignore[attr-defined]
    speeds = {}
    for count in sorted({1, 2, min(8, len(slots))}):
        state = LruState.empty(len(records), len(slots), device.device)
        each = torch.arange(count, dtype=torch.int32, device=device.device)
        state.fetch_experts[:count] = each
        state.fetch_slots[:count] = each
        state.status[COUNT] = count

        def fetch(state: LruState = state, count: int = count) -> None:
            copy_fetched(state, records, slots, most=count)

        seconds = _median_seconds(device, fetch, 5)
        speeds[str(count)] = count * records.shape[1] / seconds * 1e-9
    return speeds


def prefill_speed(
    geometry: Geometry,
    name: str,
    strategy: ExpertStrategy,
    runtime: OffloadMoeRuntime,
    device: Device,
    effort: PartsEffort,
) -> list[dict[str, Any]]:
    """Tokens per second through the MoE part of all layers; the first run is not counted, but for
    the CPU's."""
    layers = len(runtime.experts)
    results = []
    for tokens in effort.prefill_tokens:
        if name == "cpu" and tokens > effort.cpu_prefill_tokens:
            continue
        seconds = _prefill_seconds(geometry, name, strategy, tokens, layers, device, effort)
        results.append(
            {
                "model": geometry.name,
                "strategy": name,
                "slots": runtime.slots,
                "tokens": tokens,
                "ms": statistics.median(seconds) * 1e3,
                "tokens_per_s": tokens / statistics.median(seconds),
                "runs": len(seconds),
            }
        )
    return results


def _prefill_seconds(
    geometry: Geometry,
    name: str,
    strategy: ExpertStrategy,
    tokens: int,
    layers: int,
    device: Device,
    effort: PartsEffort,
) -> list[float]:
    routes = uniform_routes(geometry, steps=1, layers=layers, tokens=tokens)[0]
    ids = torch.from_numpy(routes).to(device.device)
    hidden = torch.randn(tokens, geometry.hidden, device=device.device)
    weights = torch.full((tokens, geometry.top_k), 1 / geometry.top_k, device=device.device)

    def run() -> float:
        given = ids.clone()  # a strategy may rewrite it
        device.synchronize()
        start = time.perf_counter()
        for layer_id in range(layers):
            strategy.prefill(layer_id, hidden, weights, given[layer_id])
        device.synchronize()
        return time.perf_counter() - start

    if name != "cpu":
        run()
    seconds = [run()]
    while sum(seconds) < effort.prefill_s and len(seconds) < effort.repeats:
        seconds.append(run())
    return seconds


DRY_PARTS = replace(
    PartsEffort(),
    gpu_bytes=1 << 20,
    bus_bytes=1 << 16,
    host_bytes=1 << 20,
    repeats=1,
    kernel_tokens=(1, 40),
    kernel_repeats=1,
    prefill_tokens=(5,),
    prefill_s=0.0,
)
