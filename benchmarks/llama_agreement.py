"""Do our logits agree with llama.cpp's on the demo model, with its experts in Q8_0 and in Q4_0?

    python benchmarks/llama_agreement.py --llama-python VENV/bin/python

All read the same file and the same tokens. Stated: how often two sides have the same likeliest
token, and the Kullback-Leibler divergence of their distributions. With several Pythons, which have
llama.cpp built in different ways, it also says how far those are from each other. The files are
made by `ft convert` from the demo model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llama_process import LlamaProcess
from machine import describe, describe_line, markdown_table, write_json

from freetoken import LLM
from freetoken.convert import convert
from freetoken.demo import ensure_demo_model

_TEXT = Path(__file__).with_name("agreement_text.txt")


def _ours(model: Path) -> tuple[list[int], torch.Tensor, int]:
    """Tokens of the text, the logits after each, and our threads."""
    with LLM(model, strategy="cpu") as llm:
        tokens = llm.tokenizer.encode(_TEXT.read_text())
        return tokens, llm.logits(tokens).double(), llm.stats().config.threads


def _theirs(
    python: Path, model: Path, tokens: list[int], threads: int, folder: Path
) -> tuple[torch.Tensor, bool]:
    """llama.cpp's logits, and whether it makes the same tokens of the text."""
    out = folder / "logits.npy"
    with LlamaProcess(python, model, threads, len(tokens) + 16) as llama:
        same = llama.ask("tokenize", text=_TEXT.read_text())["tokens"] == tokens
        llama.ask("logits", tokens=tokens, out=str(out))
    return torch.from_numpy(np.load(out)).double(), same


def agreement(reference: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
    """Figures over all tokens, logits float64 [T, vocab]; the divergence is that of `other`."""
    p, q = reference.log_softmax(-1), other.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    return {
        "tokens": len(reference),
        "top1_agreement": float((other.argmax(-1) == reference.argmax(-1)).double().mean()),
        "kl_mean": float(divergence.mean()),
        "kl_standard_error": float(divergence.std() / len(divergence) ** 0.5),
        "kl_max": float(divergence.max()),
        "logit_rms": float((other - reference).square().mean().sqrt()),
        "logit_std": float(reference.std()),
    }


def compare(model: Path, llama_pythons: list[Path], folder: Path) -> dict[str, Any]:
    """Ours beside each build of llama.cpp, and the builds beside the first of them."""
    tokens, ours, threads = _ours(model)
    builds = [_theirs(python, model, tokens, threads, folder) for python in llama_pythons]
    if not all(same for _, same in builds):
        raise SystemExit(f"{model}: llama.cpp makes other tokens of {_TEXT.name}")
    found = {}
    for i, (logits, _) in enumerate(builds):
        found[f"FreeToken, build {i + 1}"] = agreement(logits, ours)
        if i > 0:
            found[f"build {i + 1}, build 1"] = agreement(builds[0][0], logits)
    return found


def table(results: dict[str, Any]) -> str:
    """By format, what `compare` found."""
    header = (
        "experts",
        "sides",
        "tokens",
        "same top-1",
        "mean KL (standard error)",
        "largest KL",
        "RMS difference",
    )
    rows = [
        (
            fmt,
            sides,
            r["tokens"],
            f"{100 * r['top1_agreement']:.1f}%",
            f"{r['kl_mean']:.2e} ({r['kl_standard_error']:.1e})",
            f"{r['kl_max']:.2e}",
            f"{r['logit_rms']:.4f} of {r['logit_std']:.2f}",
        )
        for fmt, pairs in results.items()
        for sides, r in pairs.items()
    ]
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-python", type=Path, required=True, nargs="+")
    parser.add_argument("--model", type=Path, help="instead of the demo model")
    parser.add_argument("--formats", nargs="+", default=["Q8_0", "Q4_0"])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    machine = describe()
    source = args.model or ensure_demo_model(lambda _step, _done, _total: None)
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for fmt in args.formats:
            path = folder / f"{fmt}.gguf"
            convert(source, path, experts=fmt, dense=None)
            results[fmt] = compare(path, args.llama_python, folder)
            path.unlink()
    write_json(args.json, {"machine": machine, "agreement": results})
    sys.stdout.write(f"{describe_line(machine)}\n\n{table(results)}\n")


if __name__ == "__main__":
    main()
