"""What `ft generate` and `ft demo` do once their options are known."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from freetoken.config import GPU_MEMORY_FRACTION
from freetoken.errors import CheckpointError, ConfigError, FreeTokenError, RequestError

if TYPE_CHECKING:
    from freetoken import LLM, Completion, SamplingParams
    from freetoken.telemetry import Stats

DEMO_CACHE_SLOTS = 4
DEMO_MAX_FETCH = 1

notes = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options as given; what is None is left to SamplingParams' defaults."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    ignore_eos: bool = False

    def params(self) -> SamplingParams:
        from freetoken import SamplingParams

        given: dict[str, Any] = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        if "stop" in given:
            given["stop"] = tuple(given["stop"])
        return SamplingParams(**given)


@dataclass(frozen=True)
class EngineOptions:
    """Engine options as given."""

    strategy: str | None = None
    device: str = "auto"
    cache_slots: int | None = None
    max_fetch: int | None = None
    threads: int | None = None
    cpu_activations: str = "int8"
    gpu_memory_fraction: float = GPU_MEMORY_FRACTION
    kv_tokens: int | None = None

    def load(self, model: str) -> LLM:
        from freetoken import LLM
        from freetoken.cli.models import find_model

        model = find_model(model)
        with _demo_model_explained(model), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            llm = LLM(
                model,
                strategy=self.strategy or "auto",
                device=self.device,
                cache_slots=self.cache_slots,
                max_fetch=self.max_fetch,
                threads=self.threads,
                cpu_activations=self.cpu_activations,
                gpu_memory_fraction=self.gpu_memory_fraction,
                kv_tokens=self.kv_tokens,
            )
        for warning in caught:
            notes.print(f"note: {warning.message}", style="yellow", markup=False, soft_wrap=True)
        return llm


@contextlib.contextmanager
def _demo_model_explained(model: str) -> Iterator[None]:
    """A damaged demo model need not be fetched anew by hand. That it is damaged the error does not
    say: its permissions may be at fault."""
    from freetoken.demo import demo_model_path

    try:
        yield
    except CheckpointError as error:
        if Path(model) != demo_model_path():
            raise
        raise FreeTokenError(
            f"{error}\n  if the demo model is damaged: delete {model} and run `ft demo`, which "
            "builds it again"
        ) from error


@dataclass(frozen=True)
class Job:
    """One prompt and how to answer it."""

    prompt: str
    chat: bool
    sampling: SamplingOptions

    def prompt_ids(self, llm: LLM) -> list[int]:
        if self.chat:
            return llm.chat_tokens([{"role": "user", "content": self.prompt}])
        return llm.tokenizer.encode(self.prompt)


def generate(model: str, job: Job, engine: EngineOptions, *, as_json: bool) -> None:
    """Answer one prompt: streamed with a report on stderr, or as one JSON object."""
    from freetoken.cli import report

    params = job.sampling.params()
    with notes.status(escape(f"loading {model}")):
        llm = engine.load(model)
    with llm:
        if as_json:
            completion = llm.generate([job.prompt_ids(llm)], params)[0]
            sys.stdout.write(json.dumps(_as_json(completion, llm.stats())) + "\n")
            return
        _stream(llm, job, params)
        notes.print(report.table({llm.stats().config.strategy: llm.stats()}))


def demo(job: Job, engine: EngineOptions, *, as_json: bool) -> None:
    """Answer with the demo model; without a strategy, once more with hybrid and a small cache."""
    from freetoken.cli import report
    from freetoken.cli.progress import build_demo_model
    from freetoken.demo import DEMO_DESCRIPTION

    path = str(build_demo_model(notes))
    notes.print(f"Demo model: {DEMO_DESCRIPTION}.", style="dim")
    if as_json or engine.strategy is not None:
        generate(path, job, engine, as_json=as_json)
        return
    runs, texts = compared(path, job, engine)
    notes.print(report.table(runs))
    device = next(iter(runs.values())).config.device
    notes.print(_verdict(texts, job.sampling.params(), device), style="dim")


def _verdict(texts: list[str], params: SamplingParams, device: str) -> str:
    """Whether the strategies wrote the same text, as they should; on a CPU they must."""
    if len(set(texts)) == 1:
        return "Both strategies wrote the same text."
    if params.temperature > 0 and params.seed is None:
        return "The texts differ, because they were sampled without --seed."
    if device == "cpu":
        return (
            "The texts differ: on a CPU that is a bug, for all strategies compute the same bits "
            "there; please report it, with what `ft doctor` prints."
        )
    return (
        "The texts differ: on a GPU the strategies use kernels that round differently, so that a "
        "token may win over another that is as likely but for rounding."
    )


def compared(model: str, job: Job, engine: EngineOptions) -> tuple[dict[str, Stats], list[str]]:
    """Answer twice, as `engine` says and with hybrid and a small cache; what each took, by name,
    and the texts."""
    params = job.sampling.params()
    runs: dict[str, Stats] = {}
    texts = []
    for setting in (engine, _small_hybrid(engine)):
        with setting.load(model) as llm:
            config = llm.stats().config
            name = config.strategy
            if config.slots is not None:
                name += f", {config.slots} of {config.experts} experts cached"
            notes.print(
                f"\nstrategy [bold]{name}[/bold]; device {config.device}, "
                f"{config.threads} threads, {config.isa}"
            )
            notes.print(f"> {job.prompt}", style="dim", markup=False)
            texts.append(_stream(llm, job, params))
            runs[name] = llm.stats()
    return runs, texts


def _small_hybrid(engine: EngineOptions) -> EngineOptions:
    return dataclasses.replace(
        engine,
        strategy="hybrid",
        cache_slots=engine.cache_slots or DEMO_CACHE_SLOTS,
        max_fetch=DEMO_MAX_FETCH if engine.max_fetch is None else engine.max_fetch,
    )


def _stream(llm: LLM, job: Job, params: SamplingParams) -> str:
    """Print the answer as it comes; the whole of it."""
    pieces = []
    for piece in llm.stream(job.prompt_ids(llm), params):
        pieces.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(pieces)


def _as_json(completion: Completion, stats: Stats) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "finish_reason": completion.finish_reason,
        "timing": {
            "load_s": stats.timing.load_s,
            "prefill_s": stats.timing.prefill_s,
            "decode_s": stats.timing.decode_s,
            "prefill_tokens_per_s": stats.timing.prefill_tokens_per_s,
            "decode_tokens_per_s": stats.timing.decode_tokens_per_s,
        },
        "experts": {
            "steps": stats.experts.steps,
            "active": stats.experts.active,
            "hits": stats.experts.hits,
            "misses": stats.experts.misses,
            "fetched": stats.experts.fetched,
            "cpu": stats.experts.cpu,
        },
        "config": dataclasses.asdict(stats.config),
    }


def _drop_unwritten_output() -> None:
    """What stdout still buffers and cannot be rid of would fail anew when the interpreter exits,
    which then ends with status 120 whatever the command had said."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def errors_explained() -> Iterator[None]:
    """Errors that a user can mend are printed without a traceback: exit status 2 for wrong
    options, 1 for anything else, 130 after Ctrl-C."""
    try:
        yield
        sys.stdout.flush()
    except (ConfigError, RequestError) as error:
        notes.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except FreeTokenError as error:
        notes.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except BrokenPipeError as error:
        # The reader of stdout has gone (`ft generate ... | head`): nothing left to say.
        _drop_unwritten_output()
        sys.stderr.close()
        raise typer.Exit(1) from error
    except OSError as error:
        _drop_unwritten_output()
        notes.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except MemoryError as error:
        notes.print(
            f"error: out of memory: {str(error) or 'the system refuses more'}; ask for less, end "
            "other programs, or raise the limit (ulimit -v)",
            style="red",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        notes.print("\ninterrupted", style="dim")
        raise typer.Exit(130) from error
