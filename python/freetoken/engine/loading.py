"""From a path or hub id to everything that an engine runs on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from freetoken.checkpoints import open_checkpoint
from freetoken.checkpoints.base import Checkpoint
from freetoken.config import (
    CheckpointFacts,
    EngineConfig,
    Environment,
    Hardware,
    ResolvedConfig,
    read_environment,
    resolve,
    size,
)
from freetoken.engine.engine import Engine, EngineLimits, Model
from freetoken.engine.hardware import detect_hardware
from freetoken.engine.headroom import measured_headroom
from freetoken.gpu_budget import DecoderSizes
from freetoken.kernels.base import Ops
from freetoken.kvcache import KVCache, page_bytes
from freetoken.models import Decoder, load_decoder, read_spec
from freetoken.models.graphed import wrap_decoder
from freetoken.models.recorded import RecordedDecoder
from freetoken.models.spec import DecoderSpec, DenseMlpSpec, MoeSpec
from freetoken.moe.on_gpu import gpu_experts, guard_of
from freetoken.moe.runtime import MoeConfig, OffloadMoeRuntime
from freetoken.moe.store import LayerExperts, RecordLayout
from freetoken.platforms import Platform, select_platform
from freetoken.telemetry import ConfigReport
from freetoken.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `resources` closes all of it, in the right order."""

    engine: Engine
    tokenizer: Tokenizer
    runtime: OffloadMoeRuntime | None
    config: ResolvedConfig
    report: ConfigReport
    resources: ExitStack


class _MoeLoader:
    """Settles the configuration once the experts are known, and makes their runtime.

    `load_decoder` calls it with the experts of all MoE layers; for a dense model it is not called.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: DecoderSpec,
        config: EngineConfig,
        environment: Environment,
        hardware: Hardware,
        platform: Platform,
        ops: Ops,
        resources: ExitStack,
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._config = config
        self._environment = environment
        self._hardware = hardware
        self._platform = platform
        self._ops = ops
        self._resources = resources
        self.runtime: OffloadMoeRuntime | None = None
        self.formats: Counter[str] = Counter()
        self._facts: CheckpointFacts | None = None
        self._resolved: ResolvedConfig | None = None

    def __call__(self, layers: Sequence[LayerExperts], moe: MoeSpec) -> OffloadMoeRuntime:
        for layer in layers:
            for part in layer.parts:
                self.formats[part.format.name] += part.nbytes
        self._facts = self._describe(layers, moe)
        resolved = self._resolved = self._resolve(self._config, self._facts)
        if resolved.strategy is None:
            raise ValueError("experts were loaded for a model that has none")
        moe_config = MoeConfig(
            strategy=resolved.strategy,
            top_k=moe.top_k,
            cache_slots=resolved.cache_slots,
            max_fetch=resolved.max_fetch,
            overlap=resolved.overlap,
            fits_memory=self._checkpoint.file_bytes() <= self._hardware.memory_bytes,
            pinnable_bytes=self._hardware.pinnable_bytes,
        )
        platform = self._platform
        experts = None if platform.gpu is None else gpu_experts(platform.gpu)
        self.runtime = OffloadMoeRuntime.create(
            layers, moe_config, platform, platform.cpu_ops, experts
        )
        self._resources.callback(self.runtime.close)
        return self.runtime

    def resolved(self) -> ResolvedConfig:
        """The settled configuration: of the experts if there are any, else of a dense model."""
        if self._resolved is None:
            self._facts = self._describe((), None)
            self._resolved = self._resolve(self._config, self._facts)
        return self._resolved

    @property
    def gpu_memory_fraction(self) -> float | None:
        """None without a GPU."""
        return None if self._hardware.gpu_bytes is None else self._config.gpu_memory_fraction

    def settled(self, decoder: Decoder) -> ResolvedConfig:
        """The same once the decoder is there. On a GPU that computes experts, what a prefill step
        really takes then decides on the pages; weights and slots have their places already."""
        resolved = self.resolved()
        assert self._facts is not None
        if self._hardware.gpu_bytes is not None and resolved.strategy != "cpu":
            headroom_bytes = measured_headroom(
                decoder,
                self._ops,
                tokens=resolved.prefill_budget_tokens,
                sequences=resolved.max_running,
                page_tokens=resolved.page_tokens,
            )
            config = replace(self._config, strategy=resolved.strategy or "auto")
            if resolved.strategy in ("offload", "hybrid"):
                config = replace(config, cache_slots=resolved.cache_slots)
            notes = resolved.notes
            resolved = replace(self._resolve(config, self._facts, headroom_bytes), notes=notes)
            if self.runtime is not None:
                self.runtime.reset_stats()
        notes = (*resolved.notes, *_pinning_notes(self.runtime, self._hardware))
        self._resolved = replace(resolved, notes=notes)
        return self._resolved

    def _resolve(
        self, config: EngineConfig, facts: CheckpointFacts, headroom_bytes: int | None = None
    ) -> ResolvedConfig:
        return resolve(
            config,
            facts,
            self._hardware,
            overlap=self._environment.overlap,
            headroom_bytes=headroom_bytes,
        )

    def _describe(self, layers: Sequence[LayerExperts], moe: MoeSpec | None) -> CheckpointFacts:
        attention = self._spec.attention
        records = [RecordLayout.of(layer).record_bytes for layer in layers]
        counts = [layer.experts for layer in layers]
        return CheckpointFacts(
            weight_bytes=self._checkpoint.file_bytes(),
            expert_bytes=self.formats.total(),
            experts=moe.experts if moe else 0,
            top_k=moe.top_k if moe else 0,
            kv_bytes_per_token=page_bytes(
                self._spec.layers,
                1,
                attention.kv_heads,
                attention.head_dim,
                self._ops.cache_dtype,
            ),
            context_tokens=self._spec.context_tokens,
            slot_bytes=sum(records),
            largest_layer_bytes=max(
                (b * n for b, n in zip(records, counts, strict=True)), default=0
            ),
            sizes=decoder_sizes(self._spec),
        )


def decoder_sizes(spec: DecoderSpec) -> DecoderSizes:
    """The widths that activations grow with."""
    attention = spec.attention
    dense = [mlp.intermediate for mlp in spec.mlps if isinstance(mlp, DenseMlpSpec)]
    moes = [mlp for mlp in spec.mlps if isinstance(mlp, MoeSpec)]
    return DecoderSizes(
        hidden=spec.hidden,
        vocab=spec.vocab,
        query=attention.heads * attention.head_dim,
        key=attention.kv_heads * attention.head_dim,
        dense=max(dense, default=0),
        expert=max((moe.intermediate for moe in moes), default=0),
        experts=max((moe.experts for moe in moes), default=0),
        top_k=max((moe.top_k for moe in moes), default=0),
    )


def _pinning_notes(runtime: OffloadMoeRuntime | None, hardware: Hardware) -> tuple[str, ...]:
    """What the user may want to know about layers whose experts the GPU cannot read."""
    if runtime is None or not runtime.plain_layers:
        return ()
    limit = hardware.memlock_bytes
    memlock = (
        "" if limit is None else f", whose limit on locked memory is {size(limit)} (ulimit -l)"
    )
    return (
        f"the experts of {len(runtime.plain_layers)} of {len(runtime.experts)} MoE layers are not "
        f"pinned: {size(hardware.pinnable_bytes or 0)} of host memory may be, as far as the "
        f"system allows{memlock}. In decode the CPU computes those that have no slot there "
        "(hybrid), or they are copied without overlap (offload)",
    )


def load_model(model: str | Path, config: EngineConfig) -> LoadedModel:
    """Open, check and bind a checkpoint. Whatever fails, nothing stays open."""
    environment = read_environment()
    with ExitStack() as resources:
        checkpoint = open_checkpoint(model)
        resources.callback(checkpoint.close)
        spec = read_spec(checkpoint)
        tokenizer = load_tokenizer(checkpoint)
        platform = select_platform(config.device, config.threads, config.cpu_activations)
        resources.callback(platform.close)
        ops = platform.ops
        hardware = detect_hardware(gpu=ops.device if ops.device.type == "cuda" else None)
        make_moe = _MoeLoader(
            checkpoint, spec, config, environment, hardware, platform, ops, resources
        )
        decoder = load_decoder(checkpoint, spec, ops, make_moe)
        resolved = make_moe.settled(decoder)
        return LoadedModel(
            engine=_engine(decoder, tokenizer, resolved, platform, make_moe.runtime, resources),
            tokenizer=tokenizer,
            runtime=make_moe.runtime,
            config=resolved,
            report=_report(checkpoint, spec, platform, ops, resolved, make_moe),
            resources=resources.pop_all(),
        )


def _engine(
    decoder: Decoder,
    tokenizer: Tokenizer,
    resolved: ResolvedConfig,
    platform: Platform,
    runtime: OffloadMoeRuntime | None,
    resources: ExitStack,
) -> Engine:
    spec = decoder.spec
    ops = platform.ops
    kv = KVCache(
        layers=spec.layers,
        pages=resolved.kv_pages,
        page_tokens=resolved.page_tokens,
        kv_heads=spec.attention.kv_heads,
        head_dim=spec.attention.head_dim,
        device=ops.device,
        dtype=ops.cache_dtype,
    )
    limits = EngineLimits(
        vocab=spec.vocab,
        context_tokens=spec.context_tokens,
        max_running=resolved.max_running,
        prefill_budget_tokens=resolved.prefill_budget_tokens,
    )
    model = _replaying(decoder, platform, runtime, resolved.max_running, resources)
    return Engine(model, tokenizer, kv, limits)


def _replaying(
    decoder: Decoder,
    platform: Platform,
    runtime: OffloadMoeRuntime | None,
    max_running: int,
    resources: ExitStack,
) -> Model:
    """The decoder, with its decode steps as replays where the platform has them."""
    gpu, ops = platform.gpu, platform.ops
    if gpu is None:
        records = ops.can_record and (runtime is None or runtime.can_record)
        return RecordedDecoder(decoder, ops, runtime) if records else decoder
    guard = None if runtime is None else guard_of(runtime, gpu)
    graphed = wrap_decoder(decoder, ops, runtime, gpu.graphs, guard, max_running)
    resources.callback(graphed.close)
    return graphed


def _report(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    platform: Platform,
    ops: Ops,
    resolved: ResolvedConfig,
    loaded: _MoeLoader,
) -> ConfigReport:
    moe = next((mlp for mlp in spec.mlps if isinstance(mlp, MoeSpec)), None)
    return ConfigReport(
        model=str(checkpoint.path),
        family=spec.family,
        strategy=resolved.strategy or "dense",
        device=platform.device,
        slots=resolved.cache_slots,
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        format="+".join(sorted(loaded.formats)) or _main_format(checkpoint),
        threads=platform.cpu_ops.threads,
        isa=ops.description,
        max_fetch=resolved.max_fetch,
        context_tokens=spec.context_tokens,
        kv_pages=resolved.kv_pages,
        page_tokens=resolved.page_tokens,
        kv_tokens=(resolved.kv_pages - 1) * resolved.page_tokens,
        gpu_memory_fraction=loaded.gpu_memory_fraction,
        unpinned_layers=len(loaded.runtime.plain_layers) if loaded.runtime else 0,
    )


def _main_format(checkpoint: Checkpoint) -> str:
    """The format that most of the bytes are in."""
    sizes: Counter[str] = Counter()
    for name in checkpoint.names():
        entry = checkpoint.tensor(name)
        sizes[entry.format.name] += entry.data.nbytes
    return sizes.most_common(1)[0][0]
