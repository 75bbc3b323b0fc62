"""`ft bench`: measurements as tables, or as JSON with --json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from freetoken.cli import options

if TYPE_CHECKING:
    from freetoken.bench import ExpertsResult

app = typer.Typer(help="Measure this machine, the expert kernels, a model.", no_args_is_help=True)

ALL_FORMATS = "all"


@app.command("memory")
def memory(threads: options.Threads = None, json: options.Json = False) -> None:
    """Read bandwidth of the memory with all threads: what the experts are measured against."""
    from freetoken.cli import run

    with run.errors_explained():
        from freetoken.bench import measure_memory

        result = measure_memory(threads)
        if json:
            _print_json(vars(result))
            return
        typer.echo(
            f"{result.read_gbps:.2f} GB/s, {result.threads} threads "
            f"(median of {result.passes} passes over {result.buffer_bytes / 2**20:.0f} MiB; "
            f"best {result.best_gbps:.2f})"
        )


@app.command("experts")
def experts(
    format: Annotated[
        str, typer.Option(help="A weight format, several with commas, or `all` with kernels here.")
    ] = ALL_FORMATS,
    hidden: Annotated[int, typer.Option(help="Hidden size.", metavar="N")] = 2048,
    intermediate: Annotated[int, typer.Option(help="Rows of gate and up.", metavar="N")] = 768,
    experts: Annotated[int, typer.Option(help="Experts of a layer.", metavar="N")] = 64,
    top_k: Annotated[int, typer.Option(help="Experts of a token.", metavar="N")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a step.", metavar="N")] = 1,
    calls: Annotated[int, typer.Option(help="Steps to time.", metavar="N")] = 200,
    threads: options.Threads = None,
    isa: Annotated[
        str | None, typer.Option(help="Instruction set; the best of this machine if not given.")
    ] = None,
    json: options.Json = False,
) -> None:
    """One decode step of a MoE layer, beside the read bandwidth, in alternation.

    With one format --json prints an object, otherwise a list of them.
    """
    from freetoken.cli import run

    with run.errors_explained():
        from freetoken.bench import (
            ExpertShape,
            check_blocks,
            formats_with_kernels,
            measure_experts,
            named_formats,
        )

        shape = ExpertShape(hidden, intermediate, experts, top_k)
        formats = formats_with_kernels(isa) if format == ALL_FORMATS else named_formats(format, isa)
        for fmt in formats:
            check_blocks(fmt, shape)
        results = []
        for fmt in formats:
            results.append(
                measure_experts(fmt, shape, tokens=tokens, calls=calls, threads=threads, isa=isa)
            )
            if not json:
                _print_experts(results[-1], first=len(results) == 1)
        if json:
            one = len(results) == 1 and format != ALL_FORMATS
            _print_json(vars(results[0]) if one else [vars(result) for result in results])


@app.command("model")
def model(
    model: options.Model,
    prompt_tokens: Annotated[
        int, typer.Option(help="Random tokens to prefill.", metavar="N")
    ] = 512,
    decode_tokens: Annotated[int, typer.Option(help="Tokens to decode.", metavar="N")] = 128,
    runs: Annotated[
        int, typer.Option(help="Runs to take the median of, after one to warm up.", metavar="N")
    ] = 3,
    strategy: options.Strategy = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Prefill and decode speed of a model, and the bytes that a decoded token reads."""
    from freetoken.cli import run

    with run.errors_explained():
        from freetoken.bench import measure_model
        from freetoken.cli.models import find_model

        result = measure_model(
            find_model(model),
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens,
            runs=runs,
            strategy=strategy or "auto",
            device=device,
            threads=threads,
        )
        if json:
            _print_json(vars(result))
            return
        typer.echo(
            f"{result.format}, {result.isa}, {result.threads} threads, strategy {result.strategy}\n"
            f"prefill of {prompt_tokens} tokens: {result.prefill_tokens_per_s:9.1f} tokens/s\n"
            f"decode of {decode_tokens} tokens:  {result.decode_tokens_per_s:9.1f} tokens/s, "
            f"{result.bytes_per_token / 1e6:.0f} MB each: {result.decode_gbps:.2f} GB/s"
        )


def _print_experts(result: ExpertsResult, *, first: bool) -> None:
    """A line as soon as it is known: a table of all formats takes half a minute."""
    if first:
        typer.echo(
            f"{result.isa}, {result.threads} threads, {result.tokens} token(s), top-{result.top_k} "
            f"of {result.experts} experts, H={result.hidden}, I={result.intermediate}\n"
            f"{'format':12}{'GB/s':>8}{'read':>8}{'fraction':>10}{'us/layer':>10}{'MB/layer':>10}"
        )
    typer.echo(
        f"{result.format:12}{result.gbps:8.2f}{result.read_gbps:8.2f}{result.fraction:10.3f}"
        f"{result.layer_us:10.1f}{result.bytes_per_layer / 1e6:10.2f}"
    )


def _print_json(value: object) -> None:
    import json

    typer.echo(json.dumps(value))
