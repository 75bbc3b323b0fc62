"""The parts of a runtime, as each strategy needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from freetoken.config import StrategyName, resolve_slots
from freetoken.kernels.cpu import CpuExpertKernel, CpuOps
from freetoken.moe.cpu_executor import CpuMoeExecutor
from freetoken.moe.gpu_executor import GpuCpuMoeExecutor
from freetoken.moe.lru import FetchCap
from freetoken.moe.offload_cache import OffloadMoeCache
from freetoken.moe.stats import DeviceExpertCounter, ExpertCounter, StepCounter
from freetoken.moe.store import (
    BindRecords,
    ExpertStore,
    LayerExperts,
    MappedExpertStore,
    PackedExpertStore,
    SlotPool,
)
from freetoken.moe.timeline import timelines
from freetoken.platforms.base import SlotMemory

if TYPE_CHECKING:  # they need triton, which only a GPU does
    from freetoken.moe.device_cache import DeviceMoeCache
    from freetoken.moe.prefill_stream import PrefillStream


@dataclass(frozen=True)
class MoeConfig:
    """How experts are computed. `strategy` is resolved: never "auto".

    cache_slots: slots per layer, as `freetoken.config.resolve_slots` takes them. max_fetch: fetches
    per hybrid decode call and layer (None: no limit). overlap: whether a hybrid step's CPU and GPU
    work run at the same time. fits_memory: whether the whole checkpoint does, so that experts of a
    mapped one may be read ahead to where they are needed. pinnable_bytes: of packed experts, what
    may be pinned for a GPU at most (None: all); layers beyond that are `plain_layers`.
    """

    strategy: StrategyName
    top_k: int
    cache_slots: int | None = None
    max_fetch: int | None = None
    overlap: bool = True
    fits_memory: bool = False
    pinnable_bytes: int | None = None


CpuExecutor = CpuMoeExecutor | GpuCpuMoeExecutor


@dataclass(frozen=True)
class GpuExperts:
    """The GPU of a runtime: where slots, ids and counts lie, what computes on records there, and
    what runs the CPU's kernels, one per layer, beside it."""

    device: torch.device
    bind: BindRecords
    cpu_executor: Callable[[Sequence[CpuExpertKernel]], CpuExecutor]


@dataclass(frozen=True)
class RuntimeParts:
    """What a runtime owns; None is what its strategy has no use for.

    A cache keeps its books on the host (`host_cache`) or on the GPU (`device_cache`); `stream` goes
    with the latter. `plain_layers`: those of a packed store that a GPU was to read and cannot.
    """

    decode_counter: StepCounter
    prefill_counter: StepCounter
    store: ExpertStore | None = None
    pool: SlotPool | None = None
    host_cache: OffloadMoeCache | None = None
    device_cache: DeviceMoeCache | None = None
    cpu: CpuExecutor | None = None
    stream: PrefillStream | None = None
    plain_layers: frozenset[int] = frozenset()

    @property
    def cache(self) -> OffloadMoeCache | DeviceMoeCache | None:
        return self.host_cache if self.device_cache is None else self.device_cache


@dataclass(frozen=True)
class PartsBuilder:
    """Builds them, as OffloadMoeRuntime.create says."""

    layers: Sequence[LayerExperts]
    config: MoeConfig
    memory: SlotMemory
    cpu_ops: CpuOps
    gpu: GpuExperts | None

    def build(self) -> RuntimeParts:
        """For the strategy of the configuration."""
        builders: dict[StrategyName, Callable[[], RuntimeParts]] = {
            "cpu": self._cpu,
            "fused": self._fused,
            "offload": self._cached,
            "hybrid": self._cached,
        }
        return builders[self.config.strategy]()

    def _cpu(self) -> RuntimeParts:
        store = MappedExpertStore(self.layers)
        if self.config.fits_memory:
            for layer_id in range(len(self.layers)):
                self.memory.place(store.bank(layer_id), mapped=True)
        executor = self._executor(store)
        return RuntimeParts(self._counter(), self._counter(), store=store, cpu=executor)

    def _fused(self) -> RuntimeParts:
        most = max((layer.experts for layer in self.layers), default=0)
        pool = SlotPool(self.memory, self.layers, most)
        for layer in self.layers:
            pool.pack(layer)
        return RuntimeParts(self._counter(), self._counter(), pool=pool)

    def _cached(self) -> RuntimeParts:
        config = self.config
        fewest = min((layer.experts for layer in self.layers), default=0)
        slots = resolve_slots(config.strategy, config.cache_slots, fewest, config.top_k)
        cap = FetchCap.fixed(config.max_fetch)
        store = PackedExpertStore(
            self.layers,
            self.memory,
            pinned=self.gpu is not None,
            pinnable_bytes=config.pinnable_bytes,
        )
        pool = SlotPool(self.memory, self.layers, slots)
        if self.gpu is None:
            cache = OffloadMoeCache(store, pool, cap, ExpertCounter(len(self.layers)))
            return RuntimeParts(
                cache.counter,
                self._counter(),
                store=store,
                pool=pool,
                host_cache=cache,
                cpu=self._executor_beside_slots(store),
            )
        return self._cached_on_gpu(store, pool, cap, self.gpu)

    def _cached_on_gpu(
        self, store: PackedExpertStore, pool: SlotPool, cap: FetchCap, gpu: GpuExperts
    ) -> RuntimeParts:
        from freetoken.moe.device_cache import DeviceMoeCache
        from freetoken.moe.prefill_stream import PrefillStream

        cache = DeviceMoeCache(store, pool, cap, DeviceExpertCounter(store.layers, gpu.device))
        stream = PrefillStream(
            store, pool, cache, self.memory, bind=gpu.bind, timelines=timelines(gpu.device)
        )
        return RuntimeParts(
            cache.counter,
            stream.counter,
            store=store,
            pool=pool,
            device_cache=cache,
            cpu=self._executor_beside_slots(store),
            stream=stream,
            plain_layers=store.plain_layers,
        )

    def _executor_beside_slots(self, store: PackedExpertStore) -> CpuExecutor | None:
        return self._executor(store) if self.config.strategy == "hybrid" else None

    def _executor(self, store: ExpertStore) -> CpuExecutor:
        kernels = [
            self.cpu_ops.expert_kernel(store.bank(layer_id)) for layer_id in range(len(self.layers))
        ]
        return CpuMoeExecutor(kernels) if self.gpu is None else self.gpu.cpu_executor(kernels)

    def _counter(self) -> StepCounter:
        layers = len(self.layers)
        if self.gpu is None:
            return ExpertCounter(layers)
        return DeviceExpertCounter(layers, self.gpu.device)
