"""Prefill and decode speed of a whole model, and the bytes that a decoded token reads."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from freetoken.bench.counts import check_counts
from freetoken.checkpoints import open_checkpoint
from freetoken.checkpoints.base import Checkpoint, TensorEntry
from freetoken.errors import ConfigError
from freetoken.llm import LLM
from freetoken.models import read_spec
from freetoken.models.families import family_of
from freetoken.models.names import ExpertSizes
from freetoken.models.spec import MoeSpec
from freetoken.scheduler import SamplingParams


@dataclass(frozen=True)
class ModelResult:
    """Medians over runs. `bytes_per_token`: weights that one decoded token reads (top_k of the
    experts, one row of the embedding); `decode_gbps` is their product with the decode speed."""

    model: str
    format: str
    isa: str
    threads: int
    strategy: str
    prompt_tokens: int
    decode_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    bytes_per_token: int
    decode_gbps: float
    load_s: float
    runs: int


def measure_model(
    model: str | Path,
    *,
    prompt_tokens: int = 512,
    decode_tokens: int = 128,
    runs: int = 3,
    strategy: str = "auto",
    device: str = "auto",
    threads: int | None = None,
) -> ModelResult:
    """Prefill `prompt_tokens` random tokens, decode `decode_tokens` more, `runs` times after a
    first run that is not counted (it brings the file into memory). Needs no tokenizer."""
    check_counts(prompt_tokens=prompt_tokens, decode_tokens=decode_tokens, runs=runs)
    checkpoint = open_checkpoint(model)
    try:
        bytes_per_token = decode_bytes(checkpoint)
        spec = read_spec(checkpoint)
        _check_context(spec.context_tokens, prompt_tokens, decode_tokens)
        vocab = spec.vocab
    finally:
        checkpoint.close()
    prompt = np.random.default_rng(0).integers(0, vocab, prompt_tokens).tolist()
    # The first token comes out of the prefill.
    params = SamplingParams(max_tokens=decode_tokens + 1, temperature=0.0, ignore_eos=True)
    prefill, decode = [], []
    with LLM(model, strategy=strategy, device=device, threads=threads) as llm:
        for run in range(runs + 1):
            llm.reset_stats()
            llm.generate([prompt], params)
            timing = llm.stats().timing
            if run:
                prefill.append(timing.prefill_tokens_per_s)
                decode.append(timing.decode_tokens_per_s)
        stats = llm.stats()
    speed = statistics.median(decode)
    return ModelResult(
        model=str(model),
        format=stats.config.format,
        isa=stats.config.isa,
        threads=stats.config.threads,
        strategy=stats.config.strategy,
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        prefill_tokens_per_s=statistics.median(prefill),
        decode_tokens_per_s=speed,
        bytes_per_token=bytes_per_token,
        decode_gbps=bytes_per_token * speed * 1e-9,
        load_s=stats.timing.load_s,
        runs=runs,
    )


def _check_context(context_tokens: int, prompt_tokens: int, decode_tokens: int) -> None:
    """A generation ends where the context does: its speed would be that of fewer tokens."""
    most = context_tokens - 1  # one more token comes out of the prefill
    if prompt_tokens + decode_tokens > most:
        raise ConfigError(
            f"--prompt-tokens, --decode-tokens: found {prompt_tokens} and {decode_tokens}, "
            f"expected at most {most} together (the model's context is {context_tokens})"
        )


def decode_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of weights that one decoded token reads."""
    spec = read_spec(checkpoint)
    names = family_of(checkpoint).names(checkpoint)
    experts: dict[str, float] = {}  # share of the tensor's experts that a token reads, by name
    for layer, mlp in enumerate(spec.mlps):
        if isinstance(mlp, MoeSpec):
            sizes = ExpertSizes(mlp.experts, spec.hidden, mlp.intermediate)
            for name, _ in names.expert_layout(checkpoint, layer, sizes).shapes(layer, sizes):
                experts[name] = mlp.top_k / mlp.experts
    total = 0.0
    for name in checkpoint.names():
        entry = checkpoint.tensor(name)
        share = experts.get(name, 1.0)
        if name == names.embedding and not spec.tied_embeddings:
            share = 1 / spec.vocab
        total += share * _entry_bytes(entry)
    return math.ceil(total)


def _entry_bytes(entry: TensorEntry) -> int:
    return entry.data.nbytes + (0 if entry.scales is None else entry.scales.nbytes)
