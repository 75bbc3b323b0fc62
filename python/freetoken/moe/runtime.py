"""Owner of everything that computes experts: store, slots, cache, CPU and hybrid executors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from freetoken.config import StrategyName, resolve_slots
from freetoken.kernels.base import ExpertMath
from freetoken.kernels.cpu import CpuExpertKernel, CpuOps
from freetoken.moe.cpu_executor import CpuMoeExecutor
from freetoken.moe.expert_cache import ExpertCache
from freetoken.moe.gpu_executor import GpuCpuMoeExecutor
from freetoken.moe.hybrid_decode import HybridDecodeExecutor
from freetoken.moe.lru import FetchCap
from freetoken.moe.offload_cache import OffloadMoeCache
from freetoken.moe.stats import (
    DeviceExpertCounter,
    ExpertCounter,
    MoeStats,
    StepCounter,
    total_counts,
)
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


class OffloadMoeRuntime:
    """The MoE side of one loaded model; close it, or use it as a context manager.

    Strategies take from it what they need; asking for a part that the strategy has no use for is
    a RuntimeError.
    """

    def __init__(
        self,
        config: MoeConfig,
        *,
        layers: Sequence[int],
        store: ExpertStore | None,
        pool: SlotPool | None,
        cache: ExpertCache[Any] | None,
        device_cache: DeviceMoeCache | None,
        cpu: CpuExecutor | None,
        hybrid: HybridDecodeExecutor[Any] | None,
        stream: PrefillStream | None,
        plain_layers: frozenset[int],
        bind: BindRecords,
        decode_counter: StepCounter,
        prefill_counter: StepCounter,
    ) -> None:
        self.config = config
        self.experts = tuple(layers)
        self.decode_counter = decode_counter
        self.prefill_counter = prefill_counter
        self._decode_ids: dict[int, Tensor] = {}
        self.store = store
        self.pool = pool
        self.stream = stream
        self.plain_layers = plain_layers
        self._bind = bind
        self._cache = cache
        self._device_cache = device_cache
        self._cpu = cpu
        self._hybrid = hybrid

    @classmethod
    def create(
        cls,
        layers: Sequence[LayerExperts],
        config: MoeConfig,
        platform: SlotMemory,
        cpu_ops: CpuOps,
        gpu: GpuExperts | None = None,
    ) -> OffloadMoeRuntime:
        """Build what the strategy needs. Only the strategy cpu keeps views of the checkpoint.

        `cpu_ops` has the CPU's expert kernels, which also compute experts on slots in host memory.
        With `gpu` the slots lie on a GPU, its kernels compute on them and keep the cache's books.
        Raises ConfigError (slots, fetch cap), CapacityError (memory), CheckpointError (formats).
        """
        experts = tuple(layer.experts for layer in layers)
        slots = resolve_slots(
            config.strategy, config.cache_slots, min(experts, default=0), config.top_k
        )
        cap = FetchCap.fixed(config.max_fetch)
        decode, prefill = _new_counter(len(layers), gpu), _new_counter(len(layers), gpu)
        bind = _on_host(cpu_ops) if gpu is None else gpu.bind
        store: ExpertStore | None = None
        plain: frozenset[int] = frozenset()
        pool = hybrid = None
        cpu: CpuExecutor | None = None
        cache: OffloadMoeCache | DeviceMoeCache | None = None
        device_cache: DeviceMoeCache | None = None
        stream: PrefillStream | None = None
        if config.strategy == "cpu":
            store = MappedExpertStore(layers)
            if config.fits_memory:
                for i in range(len(layers)):
                    platform.place(store.bank(i), mapped=True)
        elif config.strategy == "fused":
            pool = SlotPool(platform, layers, max(experts, default=0))
            for layer in layers:
                pool.pack(layer)
        else:
            store = packed = PackedExpertStore(
                layers, platform, pinned=gpu is not None, pinnable_bytes=config.pinnable_bytes
            )
            plain = packed.plain_layers
            pool = SlotPool(platform, layers, slots)
            if gpu is None:
                cache = host = OffloadMoeCache(packed, pool, cap, ExpertCounter(len(layers)))
                decode = host.counter
            else:
                cache, stream = device_cache, stream = _on_gpu(packed, pool, cap, platform, gpu)
                decode, prefill = device_cache.counter, stream.counter
        if store is not None and config.strategy != "offload":
            kernels = [cpu_ops.expert_kernel(store.bank(i)) for i in range(len(layers))]
            cpu = CpuMoeExecutor(kernels) if gpu is None else gpu.cpu_executor(kernels)
        if cpu is not None and cache is not None:
            hybrid = HybridDecodeExecutor[Any](cache, cpu, overlap=config.overlap)
        return cls(
            config,
            layers=experts,
            store=store,
            pool=pool,
            cache=cache,
            device_cache=device_cache,
            cpu=cpu,
            hybrid=hybrid,
            stream=stream,
            plain_layers=plain,
            bind=bind,
            decode_counter=decode,
            prefill_counter=prefill,
        )

    @property
    def slots(self) -> int:
        """Slots per layer; 0 for the strategy cpu."""
        return self.pool.slots if self.pool is not None else 0

    @property
    def cache(self) -> ExpertCache[Any]:
        if self._cache is None:
            raise self._has_no("cache")
        return self._cache

    @property
    def cpu(self) -> CpuExecutor:
        if self._cpu is None:
            raise self._has_no("CPU executor")
        return self._cpu

    @property
    def gpu_cpu(self) -> GpuCpuMoeExecutor | None:
        """What computes experts on the CPU beside a GPU's stream; None where nothing does."""
        return self._cpu if isinstance(self._cpu, GpuCpuMoeExecutor) else None

    @property
    def device_cache(self) -> DeviceMoeCache | None:
        """The cache, if its books lie on a GPU: then a step must be asked for the errors that it
        has marked."""
        return self._device_cache

    @property
    def hybrid(self) -> HybridDecodeExecutor[Any]:
        if self._hybrid is None:
            raise self._has_no("hybrid executor")
        return self._hybrid

    def _has_no(self, part: str) -> RuntimeError:
        return RuntimeError(f"a {self.config.strategy} runtime has no {part}, or it is closed")

    def slot_kernel(self, layer_id: int) -> ExpertMath | None:
        """What computes on the slots of a layer, for its GPU expert callback; None where there are
        none."""
        pool = self.pool
        return None if pool is None else self._bind(pool.layouts[layer_id], pool.records(layer_id))

    @property
    def can_record(self) -> bool:
        """Whether a decode step calls operators and nothing else: the CPU computes every expert."""
        return isinstance(self._cpu, CpuMoeExecutor) and self._cache is None

    def can_capture_decode(self, tokens: int) -> bool:
        """Whether a decode step of so many rows, padded ones too, reads no device value on the
        host. It does where every miss is fetched, and there may be more of them than slots, or
        some are copied from records that the GPU cannot read (`plain_layers`)."""
        if self._cache is None or self._hybrid is not None:
            return True
        return not self.plain_layers and tokens * self.config.top_k <= self._cache.slots

    def count_decode(self, layer_id: int, topk_ids: Tensor) -> None:
        """Count a layer's decode step, all of whose experts the CPU computes."""
        self._decode_ids[layer_id] = topk_ids
        self.decode_counter.add_routes(layer_id, topk_ids, self.experts[layer_id], on_cpu=True)

    def decode_ids(self) -> dict[int, Tensor]:
        """By layer, the ids of the last decode step that was counted."""
        return dict(self._decode_ids)

    def stats(self) -> MoeStats:
        """Counts since the start or the last reset."""
        cache = self._cache  # on a GPU it also raises what its kernels could only mark
        layers = self.decode_counter.layers() if cache is None else cache.stats()
        return MoeStats(total_counts(layers), layers, total_counts(self.prefill_counter.layers()))

    def reset_stats(self) -> None:
        """Set all counts to zero. What the cache holds stays."""
        self.decode_counter.reset()
        self.prefill_counter.reset()

    def close(self) -> None:
        """Finish CPU work and let go of all weights, but those that layers have bound: they go with
        the layers. May be called again."""
        cpu, self._cpu = self._cpu, None
        self._hybrid = self._cache = self._device_cache = None
        self.store = self.pool = self.stream = None
        self._decode_ids = {}
        if cpu is not None:
            cpu.close()

    def __enter__(self) -> OffloadMoeRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _new_counter(layers: int, gpu: GpuExperts | None) -> StepCounter:
    return ExpertCounter(layers) if gpu is None else DeviceExpertCounter(layers, gpu.device)


def _on_host(ops: CpuOps) -> BindRecords:
    return lambda layout, records: ops.expert_kernel(layout.bank(records))


def _on_gpu(
    store: PackedExpertStore,
    pool: SlotPool,
    cap: FetchCap,
    memory: SlotMemory,
    gpu: GpuExperts,
) -> tuple[DeviceMoeCache, PrefillStream]:
    from freetoken.moe.device_cache import DeviceMoeCache
    from freetoken.moe.prefill_stream import PrefillStream

    cache = DeviceMoeCache(store, pool, cap, DeviceExpertCounter(store.layers, gpu.device))
    stream = PrefillStream(
        store, pool, cache, memory, bind=gpu.bind, timelines=timelines(gpu.device)
    )
    return cache, stream
