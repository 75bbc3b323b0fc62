"""Every benchmark of the performance bars in one run: a markdown table and a JSON file.

    python benchmarks/run_all.py --folder SCRATCH --llama-python VENV/bin/python --out results

Writes SCRATCH/<type>.gguf (a few GB each, made once), results.md and results.json. Takes about
half an hour on two cores; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import llama_agreement
import overhead
import vs_llama_cpp
from machine import describe, describe_line, markdown_table, write_json
from synthetic import write_synthetic

from freetoken.bench import ExpertShape, formats_with_kernels, measure_experts, measure_memory
from freetoken.convert import convert
from freetoken.demo import ensure_demo_model

# Of the read bandwidth, one token; formats that no bar names are shown without one.
EXPERT_BARS = {
    **dict.fromkeys(("BF16", "Q8_0", "Q4_0", "Q4_K", "MXFP4", "NVFP4", "DS_FP4", "FP8_128"), 0.90),
    **dict.fromkeys(("Q5_K", "Q6_K"), 0.85),
}
# Layers of the synthetic files: large enough to leave every cache, small enough for the memory.
SYNTHETIC = {"Q4_0": 8, "Q4_K": 4, "Q8_0": 4, "MXFP4": 4}
TOKENS = (1, 2, 4, 8)


def experts(threads: int | None) -> tuple[str, list[Any]]:
    results, rows = [], []
    for fmt in formats_with_kernels():
        by_tokens = [
            measure_experts(fmt, ExpertShape(), tokens=tokens, threads=threads) for tokens in TOKENS
        ]
        results += [vars(result) for result in by_tokens]
        one = by_tokens[0]
        rows.append(
            (
                fmt.name,
                f"{one.gbps:.2f}",
                f"{one.read_gbps:.2f}",
                f"{one.fraction:.3f}",
                EXPERT_BARS.get(fmt.name, ""),
                *(f"{r.layer_us:.0f} ({r.distinct_experts:.1f})" for r in by_tokens),
            )
        )
        sys.stderr.write(f"experts {fmt.name}: {one.fraction:.3f}\n")
    counts = [f"us, {n} token{'s' if n > 1 else ''} (experts)" for n in TOKENS]
    return markdown_table(("format", "GB/s", "read", "fraction", "bar", *counts), rows), results


def models(args: argparse.Namespace) -> tuple[str, list[Any]]:
    paths = []
    for kind, layers in SYNTHETIC.items():
        path = args.folder / f"qwen3-30b-geometry-{layers}x{kind}.gguf"
        if not path.exists():
            partial = path.with_suffix(".partial")
            write_synthetic(partial, layers=layers, type_name=kind)
            partial.rename(path)
        paths.append(path)
    paths.append(ensure_demo_model(lambda _step, _done, _total: None))
    results = []
    for path in paths:
        results.append(
            vs_llama_cpp.compare(
                path,
                args.llama_python[0],
                prefill=[512, 128],
                decode=128,
                runs=args.runs,
                threads=args.threads,
            )
        )
        sys.stderr.write(f"{path.name}: done\n")
    return vs_llama_cpp.table(results), results


def agreements(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    source, results = ensure_demo_model(lambda _step, _done, _total: None), {}
    for fmt in ("Q8_0", "Q4_0"):
        path = args.folder / f"demo-{fmt}.gguf"
        if not path.exists():
            convert(source, path, experts=fmt)
        results[fmt] = llama_agreement.compare(path, args.llama_python, args.folder)
    return llama_agreement.table(results), results


def overheads(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    empty_us = overhead.empty_layer_us(args.threads)
    memory = overhead.resident_bytes(ensure_demo_model(lambda _step, _done, _total: None))
    rows = [
        ("empty CPU layer, us", f"{empty_us:.2f}", overhead.EMPTY_LAYER_BAR_US),
        ("resident / file size, demo model", f"{memory['ratio']:.3f}", overhead.MEMORY_BAR),
    ]
    table = markdown_table(("", "measured", "bar"), rows)
    return table, {"empty_layer_us": empty_us, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the synthetic files")
    parser.add_argument(
        "--llama-python", type=Path, required=True, nargs="+", help="the first is timed"
    )
    parser.add_argument("--out", type=Path, required=True, help="without suffix")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    machine = describe()
    memory = measure_memory(args.threads)
    sections = {
        "Experts, beside the read bandwidth": experts(args.threads),
        "Models, beside llama.cpp (tokens per second)": models(args),
        "Logits, beside llama.cpp": agreements(args),
        "Overhead": overheads(args),
    }
    text = f"{describe_line(machine)}; read bandwidth {memory.read_gbps:.1f} GB/s\n"
    for title, (table, _) in sections.items():
        text += f"\n### {title}\n\n{table}\n"
    figures = {title: figures for title, (_, figures) in sections.items()}
    args.out.with_suffix(".md").write_text(text)
    write_json(
        args.out.with_suffix(".json"), {"machine": machine, "memory": vars(memory), **figures}
    )
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
