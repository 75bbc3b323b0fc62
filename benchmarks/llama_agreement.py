"""Do our logits agree with llama.cpp's on the demo model, with its experts in Q8_0 and in Q4_0?

    python benchmarks/llama_agreement.py --llama-python VENV/bin/python

Both read the same file and the same tokens. Stated: how often both have the same likeliest token,
and the Kullback-Leibler divergence of our distribution from llama.cpp's. The Q4_0 file is made by
`ft convert` from the demo model.
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


def agreement(model: Path, llama_python: Path, folder: Path) -> dict[str, Any]:
    """Figures over all tokens of the text."""
    text = _TEXT.read_text()
    with LLM(model, strategy="cpu") as llm:
        tokens = llm.tokenizer.encode(text)
        ours = llm.logits(tokens).double()
        threads = llm.stats().config.threads
    out = folder / "logits.npy"
    with LlamaProcess(llama_python, model, threads, len(tokens) + 16) as llama:
        same_tokens = llama.ask("tokenize", text=text)["tokens"] == tokens
        llama.ask("logits", tokens=tokens, out=str(out))
    theirs = torch.from_numpy(np.load(out)).double()
    p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    return {
        "tokens": len(tokens),
        "same_tokens": same_tokens,
        "top1_agreement": float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
        "kl_mean": float(divergence.mean()),
        "kl_max": float(divergence.max()),
        "logit_rms": float((ours - theirs).square().mean().sqrt()),
        "logit_std": float(theirs.std()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-python", type=Path, required=True)
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
            results[fmt] = agreement(path, args.llama_python, folder)
            path.unlink()
    rows = [
        (
            fmt,
            r["tokens"],
            f"{100 * r['top1_agreement']:.1f}%",
            f"{r['kl_mean']:.2e}",
            f"{r['kl_max']:.2e}",
            f"{r['logit_rms']:.4f} of {r['logit_std']:.2f}",
        )
        for fmt, r in results.items()
    ]
    write_json(args.json, {"machine": machine, "agreement": results})
    header = ("experts", "tokens", "same top-1", "mean KL", "largest KL", "logits' RMS difference")
    sys.stdout.write(f"{describe_line(machine)}\n\n{markdown_table(header, rows)}\n")


if __name__ == "__main__":
    main()
