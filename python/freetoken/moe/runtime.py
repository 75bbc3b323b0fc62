"""Owner of everything that computes experts: store, slots, cache, CPU and hybrid executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from freetoken.kernels.base import ExpertMath
from freetoken.kernels.cpu import CpuOps
from freetoken.moe.cpu_executor import CpuMoeExecutor
from freetoken.moe.expert_cache import ExpertCache
from freetoken.moe.gpu_executor import GpuCpuMoeExecutor
from freetoken.moe.hybrid_decode import HybridDecodeExecutor
from freetoken.moe.runtime_parts import (
    CpuExecutor,
    GpuExperts,
    MoeConfig,
    PartsBuilder,
    RuntimeParts,
)
from freetoken.moe.stats import MoeStats, total_counts
from freetoken.moe.store import BindRecords, LayerExperts
from freetoken.platforms.base import SlotMemory

if TYPE_CHECKING:  # it needs triton, which only a GPU does
    from freetoken.moe.device_cache import DeviceMoeCache

__all__ = ["CpuExecutor", "GpuExperts", "MoeConfig", "OffloadMoeRuntime"]


class OffloadMoeRuntime:
    """The MoE side of one loaded model; close it, or use it as a context manager.

    Strategies take from it what they need; asking for a part that the strategy has no use for is
    a RuntimeError.
    """

    def __init__(
        self, config: MoeConfig, layers: Sequence[int], parts: RuntimeParts, bind: BindRecords
    ) -> None:
        self.config = config
        self.experts = tuple(layers)
        self.decode_counter = parts.decode_counter
        self.prefill_counter = parts.prefill_counter
        self._decode_ids: dict[int, Tensor] = {}
        self.store = parts.store
        self.pool = parts.pool
        self.stream = parts.stream
        self.plain_layers = parts.plain_layers
        self._bind = bind
        self._cache: ExpertCache[Any] | None = parts.cache
        self._device_cache = parts.device_cache
        self._cpu = parts.cpu
        self._hybrid: HybridDecodeExecutor[Any] | None = None
        if self._cpu is not None and self._cache is not None:
            self._hybrid = HybridDecodeExecutor(self._cache, self._cpu, overlap=config.overlap)

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
        parts = PartsBuilder(layers, config, platform, cpu_ops, gpu).build()
        bind = _on_host(cpu_ops) if gpu is None else gpu.bind
        return cls(config, [layer.experts for layer in layers], parts, bind)

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


def _on_host(ops: CpuOps) -> BindRecords:
    return lambda layout, records: ops.expert_kernel(layout.bank(records))
