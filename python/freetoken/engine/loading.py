"""From a path or hub id to everything that an engine runs on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
)
from freetoken.engine.engine import Engine, EngineLimits
from freetoken.engine.hardware import detect_hardware
from freetoken.kernels.base import Ops
from freetoken.kvcache import KVCache, page_bytes
from freetoken.models import Decoder, load_decoder, read_spec
from freetoken.models.recorded import RecordedDecoder
from freetoken.models.spec import DecoderSpec, MoeSpec
from freetoken.moe.gpu_executor import GpuCpuMoeExecutor
from freetoken.moe.runtime import GpuExperts, MoeConfig, OffloadMoeRuntime
from freetoken.moe.store import LayerExperts
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
        self._resolved: ResolvedConfig | None = None

    def __call__(self, layers: Sequence[LayerExperts], moe: MoeSpec) -> OffloadMoeRuntime:
        for layer in layers:
            for part in layer.parts:
                self.formats[part.format.name] += part.nbytes
        resolved = self._resolve(moe.experts, moe.top_k)
        if resolved.strategy is None:
            raise ValueError("experts were loaded for a model that has none")
        moe_config = MoeConfig(
            strategy=resolved.strategy,
            top_k=moe.top_k,
            cache_slots=resolved.cache_slots,
            max_fetch=resolved.max_fetch,
            overlap=resolved.overlap,
            fits_memory=self._checkpoint.file_bytes() <= self._hardware.memory_bytes,
        )
        self.runtime = OffloadMoeRuntime.create(
            layers, moe_config, self._platform, self._platform.cpu_ops, _gpu_experts(self._platform)
        )
        self._resources.callback(self.runtime.close)
        return self.runtime

    def resolved(self) -> ResolvedConfig:
        """The settled configuration: of the experts if there are any, else of a dense model."""
        return self._resolved or self._resolve(experts=0, top_k=0)

    def _resolve(self, experts: int, top_k: int) -> ResolvedConfig:
        attention = self._spec.attention
        facts = CheckpointFacts(
            weight_bytes=self._checkpoint.file_bytes(),
            expert_bytes=self.formats.total(),
            experts=experts,
            top_k=top_k,
            kv_bytes_per_token=page_bytes(
                self._spec.layers,
                1,
                attention.kv_heads,
                attention.head_dim,
                self._ops.cache_dtype,
            ),
            context_tokens=self._spec.context_tokens,
        )
        self._resolved = resolve(
            self._config, facts, self._hardware, overlap=self._environment.overlap
        )
        return self._resolved


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
        make_moe = _MoeLoader(
            checkpoint, spec, config, environment, detect_hardware(), platform, ops, resources
        )
        decoder = load_decoder(checkpoint, spec, ops, make_moe)
        resolved = make_moe.resolved()
        return LoadedModel(
            engine=_engine(decoder, tokenizer, resolved, ops, make_moe.runtime),
            tokenizer=tokenizer,
            runtime=make_moe.runtime,
            config=resolved,
            report=_report(checkpoint, spec, platform, ops, resolved, make_moe.formats),
            resources=resources.pop_all(),
        )


def _gpu_experts(platform: Platform) -> GpuExperts | None:
    gpu = platform.gpu
    if gpu is None:
        return None
    from freetoken.moe.device_bank import device_bank  # it needs triton

    return GpuExperts(
        device=gpu.ops.device,
        bind=lambda layout, records: gpu.ops.experts(device_bank(layout, records)),
        cpu_executor=lambda kernels: GpuCpuMoeExecutor(kernels, gpu.handshake(), gpu.streams),
    )


def _engine(
    decoder: Decoder,
    tokenizer: Tokenizer,
    resolved: ResolvedConfig,
    ops: Ops,
    runtime: OffloadMoeRuntime | None,
) -> Engine:
    spec = decoder.spec
    records = ops.can_record and (runtime is None or runtime.can_record)
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
    model = RecordedDecoder(decoder, ops, runtime) if records else decoder
    return Engine(model, tokenizer, kv, limits)


def _report(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    platform: Platform,
    ops: Ops,
    resolved: ResolvedConfig,
    expert_formats: Counter[str],
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
        format="+".join(sorted(expert_formats)) or _main_format(checkpoint),
        threads=ops.threads,
        isa=ops.description,
        max_fetch=resolved.max_fetch,
        context_tokens=spec.context_tokens,
        kv_pages=resolved.kv_pages,
        page_tokens=resolved.page_tokens,
    )


def _main_format(checkpoint: Checkpoint) -> str:
    """The format that most of the bytes are in."""
    sizes: Counter[str] = Counter()
    for name in checkpoint.names():
        entry = checkpoint.tensor(name)
        sizes[entry.format.name] += entry.data.nbytes
    return sizes.most_common(1)[0][0]
