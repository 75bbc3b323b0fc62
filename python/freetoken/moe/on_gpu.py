"""What a runtime and its steps take of a GPU's platform."""

from __future__ import annotations

from freetoken.moe.gpu_executor import GpuCpuMoeExecutor
from freetoken.moe.runtime import GpuExperts, OffloadMoeRuntime
from freetoken.moe.step_guard import CacheMarks, DeviceGuard
from freetoken.platforms.base import GpuSide


def gpu_experts(gpu: GpuSide) -> GpuExperts:
    """For OffloadMoeRuntime.create."""
    from freetoken.moe.device_bank import device_bank  # it needs triton

    return GpuExperts(
        device=gpu.ops.device,
        bind=lambda layout, records: gpu.ops.experts(device_bank(layout, records)),
        cpu_executor=lambda kernels: GpuCpuMoeExecutor(kernels, gpu.handshake(), gpu.streams),
    )


def guard_of(runtime: OffloadMoeRuntime, gpu: GpuSide) -> DeviceGuard | None:
    """What asks each step of the runtime for its errors; None where there can be none."""
    executor, cache = runtime.gpu_cpu, runtime.device_cache
    if executor is None and cache is None:
        return None
    marks = None if cache is None else CacheMarks(cache, gpu.streams)
    return DeviceGuard(gpu.graphs.synchronize, executor, marks)
