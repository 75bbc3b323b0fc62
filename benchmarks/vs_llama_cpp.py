"""FreeToken and llama.cpp on the same GGUF file with the same threads, in alternation.

    python benchmarks/vs_llama_cpp.py MODEL.gguf... --llama-python VENV/bin/python

VENV is a virtual environment with llama-cpp-python (built with CMAKE_ARGS=-DGGML_NATIVE=ON); its
low-level llama_decode is timed and nothing else of it. Ours is timed whole: scheduling, sampling
and all. Both read the same random tokens and decode from the same position on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from llama_process import LlamaProcess
from machine import describe, describe_line, markdown_table, write_json

from freetoken import LLM, SamplingParams
from freetoken.bench.memory import measure_memory
from freetoken.bench.model import decode_bytes
from freetoken.checkpoints import open_checkpoint
from freetoken.models import read_spec

# Threads of either side spin for some milliseconds after their work: wait until they sleep.
_PAUSE_S = 0.1


def compare(
    model: Path,
    llama_python: Path,
    *,
    prefill: list[int],
    decode: int,
    runs: int,
    threads: int | None,
) -> dict[str, Any]:
    """Medians of `runs` alternating runs. The last entry of `prefill` is decoded from."""
    checkpoint = open_checkpoint(model)
    bytes_per_token, vocab = decode_bytes(checkpoint), read_spec(checkpoint).vocab
    checkpoint.close()
    rng = np.random.default_rng(1)
    prompts = {n: rng.integers(0, vocab, n).tolist() for n in prefill}
    following = rng.integers(0, vocab, decode).tolist()
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    with LLM(model, strategy="cpu", threads=threads) as llm:
        count = llm.stats().config.threads
        context = max(prefill) + decode + 16
        with LlamaProcess(llama_python, model, count, context) as llama:
            for run in range(runs + 1):  # the first one warms up
                for n, prompt in prompts.items():
                    steps = decode if n == prefill[-1] else 0
                    mine = _ours(llm, prompt, steps)
                    time.sleep(_PAUSE_S)
                    other = llama.ask("run", tokens=prompt, decode=following[:steps])
                    time.sleep(_PAUSE_S)
                    if run:
                        _record(ours, n, steps, mine)
                        _record(theirs, n, steps, other)
            description = llama.description
        config = llm.stats().config
    result: dict[str, Any] = {
        "model": model.name,
        "format": config.format,
        "isa": config.isa,
        "threads": count,
        "runs": runs,
        "bytes_per_token": bytes_per_token,
        "llama_cpp": description,
    }
    for what in ours:
        a, b = statistics.median(ours[what]), statistics.median(theirs[what])
        result[what] = {"freetoken": a, "llama_cpp": b, "ratio": a / b}
    return result


def _ours(llm: LLM, prompt: list[int], steps: int) -> dict[str, float]:
    llm.reset_stats()
    params = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
    llm.generate([prompt], params)
    timing = llm.stats().timing
    return {"prefill_s": timing.prefill_s, "decode_s": timing.decode_s}


def _record(speeds: dict[str, list[float]], prompt: int, steps: int, took: Any) -> None:
    speeds.setdefault(f"prefill_{prompt}", []).append(prompt / took["prefill_s"])
    if steps:
        speeds.setdefault("decode", []).append(steps / took["decode_s"])


def table(results: list[dict[str, Any]]) -> str:
    """Tokens per second, and the GB/s of weights that decoding reads."""
    rows = []
    for result in results:
        for what in sorted(key for key in result if key == "decode" or "prefill_" in key):
            pair = result[what]
            gbps = ["", ""]
            if what == "decode":
                gbps = [
                    f"{pair[side] * result['bytes_per_token'] * 1e-9:.1f}"
                    for side in ("freetoken", "llama_cpp")
                ]
            rows.append(
                (
                    result["model"],
                    what.replace("_", " "),
                    f"{pair['freetoken']:.1f}",
                    f"{pair['llama_cpp']:.1f}",
                    f"{pair['ratio']:.2f}",
                    *gbps,
                )
            )
    header = ("model", "", "FreeToken tok/s", "llama.cpp tok/s", "ratio", "GB/s", "its GB/s")
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--llama-python", type=Path, required=True)
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 128])
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    machine = describe()
    memory = measure_memory(args.threads)
    results = []
    for model in args.models:
        results.append(
            compare(
                model,
                args.llama_python,
                prefill=args.prefill,
                decode=args.decode,
                runs=args.runs,
                threads=args.threads,
            )
        )
        sys.stderr.write(f"{model}: done\n")
    write_json(args.json, {"machine": machine, "memory": vars(memory), "models": results})
    sys.stdout.write(
        f"{describe_line(machine)}; read bandwidth {memory.read_gbps:.1f} GB/s with "
        f"{memory.threads} threads; {results[0]['isa']}\n\n{table(results)}\n"
    )


if __name__ == "__main__":
    main()
