"""What resolving goes by, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.config.options import StrategyName
from freetoken.gpu_budget import DecoderSizes


@dataclass(frozen=True)
class CheckpointFacts:
    """What resolving needs to know of a checkpoint. `experts` and `top_k` are 0 if it is dense.

    As records, packed: `slot_bytes` is one expert of every layer, `largest_layer_bytes` all
    experts of the layer that takes most. `sizes` are what activations grow with.
    """

    weight_bytes: int
    expert_bytes: int
    experts: int
    top_k: int
    kv_bytes_per_token: int
    context_tokens: int
    slot_bytes: int
    largest_layer_bytes: int
    sizes: DecoderSizes


@dataclass(frozen=True)
class Hardware:
    """Memory that can be had now.

    `gpu_bytes` are free on the GPU that is used; None: none is.
    `pinnable_bytes` of host memory may be pinned for it. `memlock_bytes` is the limit that the
    process has on locked memory (None: none); drivers that pin memory rarely ask for it.
    """

    memory_bytes: int
    gpu_bytes: int | None = None
    pinnable_bytes: int | None = None
    memlock_bytes: int | None = None


@dataclass(frozen=True)
class ResolvedConfig:
    """Everything settled; nothing changes it afterwards.

    `strategy` is None for a dense model, `cache_slots` None where nothing is cached. `notes` says
    which options have no effect here.
    """

    strategy: StrategyName | None
    cache_slots: int | None
    max_fetch: int | None
    overlap: bool
    page_tokens: int
    kv_pages: int
    max_running: int
    prefill_budget_tokens: int
    notes: tuple[str, ...]
