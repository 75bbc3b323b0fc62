"""The commands of `ft`. Each gathers its options and hands them on; nothing heavy is imported
before a command runs, so that help and errors in the options come at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from freetoken.cli import bench, options
from freetoken.config import GPU_MEMORY_FRACTION

app = typer.Typer(
    name="ft",
    help="Run Mixture-of-Experts language models on the machine you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing Rich for the help alone would take longer than the rest
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(help="The models in the cache.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(bench.app, name="bench")


@app.callback()
def _ft(
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
) -> None:
    """Global options. `ft --version` alone is answered before this module is imported."""
    if version:
        from freetoken import __version__

        typer.echo(f"freetoken {__version__}")
        raise typer.Exit


@app.command()
def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Option(help="The text to continue, or to answer with --chat.")],
    chat: options.Chat = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    strategy: options.Strategy = None,
    device: options.Device = "auto",
    cache_slots: options.CacheSlots = None,
    max_fetch: options.MaxFetch = None,
    threads: options.Threads = None,
    cpu_activations: options.CpuActivations = "int8",
    gpu_memory_fraction: options.GpuMemoryFraction = GPU_MEMORY_FRACTION,
    kv_tokens: options.KvTokens = None,
    ignore_eos: options.IgnoreEos = False,
    json: options.Json = False,
) -> None:
    """Generate text with a model."""
    from freetoken.cli import run

    sampling = run.SamplingOptions(
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop, ignore_eos
    )
    engine = run.EngineOptions(
        strategy,
        device,
        cache_slots,
        max_fetch,
        threads,
        cpu_activations,
        gpu_memory_fraction,
        kv_tokens,
    )
    with run.errors_explained():
        run.generate(model, run.Job(prompt, chat, sampling), engine, as_json=json)


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "Why is the sky blue?",
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Put the prompt into the chat template.")
    ] = True,
    max_tokens: options.DemoMaxTokens = 160,
    temperature: options.DemoTemperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    strategy: options.DemoStrategy = None,
    device: options.Device = "auto",
    cache_slots: options.CacheSlots = None,
    max_fetch: options.MaxFetch = None,
    threads: options.Threads = None,
    cpu_activations: options.CpuActivations = "int8",
    gpu_memory_fraction: options.GpuMemoryFraction = GPU_MEMORY_FRACTION,
    kv_tokens: options.KvTokens = None,
    ignore_eos: options.IgnoreEos = False,
    json: options.Json = False,
) -> None:
    """Build the demo model once, and generate text with it.

    Without --strategy (and without --json) it answers twice: with the strategy that suits the
    machine, then with hybrid and a small cache, and compares the two.
    """
    from freetoken.cli import run

    sampling = run.SamplingOptions(
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop, ignore_eos
    )
    engine = run.EngineOptions(
        strategy,
        device,
        cache_slots,
        max_fetch,
        threads,
        cpu_activations,
        gpu_memory_fraction,
        kv_tokens,
    )
    with run.errors_explained():
        run.demo(run.Job(prompt, chat, sampling), engine, as_json=json)


@app.command()
def convert(
    model: options.Model,
    out: Annotated[Path, typer.Option(help="The GGUF file to write; must not exist yet.")],
    experts: Annotated[str, typer.Option(help="Format of the experts, e.g. MXFP4 or Q4_K.")],
    dense: Annotated[
        str | None, typer.Option(help="Format of all other matrices; kept if not given.")
    ] = None,
) -> None:
    """Write a checkpoint as a GGUF file with its experts in a chosen format."""
    from freetoken.cli import run

    with run.errors_explained():
        from freetoken.cli import convert as command

        command.run(model, out, experts, dense)


@app.command()
def doctor(
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure the memory's read bandwidth too.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show what FreeToken sees on this machine and would use.

    The exit status is 1 if something is broken, such as a GPU whose driver cannot be opened.
    """
    from freetoken.cli import run

    with run.errors_explained():
        from freetoken.cli import doctor as command

        command.run(bench=bench, as_json=json)


@models_app.command("list")
def models_list() -> None:
    """List the models in the cache, with their sizes."""
    from freetoken.cli import models, run

    with run.errors_explained():
        models.show_list()


@models_app.command("path")
def models_path(
    name: Annotated[
        str | None, typer.Argument(help="A model as `ft models list` names it.")
    ] = None,
) -> None:
    """Print where the cache is, or where one of its models is."""
    from freetoken.cli import models, run

    with run.errors_explained():
        models.show_path(name)
