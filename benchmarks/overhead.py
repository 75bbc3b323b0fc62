"""What a CPU layer without any CPU route costs, and how much memory a loaded model takes.

    python benchmarks/overhead.py [--model MODEL.gguf]

Bars: submit and wait of an empty layer 5 microseconds; resident memory the file's size plus 10%.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe, describe_line, markdown_table, write_json

from freetoken.bench.experts import ExpertShape, random_layer
from freetoken.formats import by_name
from freetoken.kernels.cpu import CpuOps

EMPTY_LAYER_BAR_US = 5.0
MEMORY_BAR = 1.10
_CALLS = 20000


def empty_layer_us(threads: int | None) -> float:
    """Median microseconds of submit and wait when no token has a route for the CPU."""
    shape = ExpertShape(experts=4, top_k=2)
    ops = CpuOps(threads)
    try:
        kernel = ops.expert_kernel(random_layer(by_name("Q4_0"), shape))
        x, weights = torch.randn(1, shape.hidden), torch.zeros(1, shape.top_k)
        ids = torch.full((1, shape.top_k), -1, dtype=torch.int32)
        seconds = []
        for _ in range(_CALLS):
            start = time.perf_counter()
            kernel.submit(x, weights, ids).wait()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e6
    finally:
        ops.close()


_CHILD = """
import sys
from pathlib import Path
def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
from freetoken import LLM, SamplingParams
from freetoken.models import read_spec
from freetoken.checkpoints import open_checkpoint
before = resident("VmRSS:")
checkpoint = open_checkpoint(sys.argv[1])
vocab = read_spec(checkpoint).vocab
checkpoint.close()
with LLM(sys.argv[1], strategy="cpu") as llm:
    prompt = [i * 7919 % vocab for i in range(256)]
    llm.generate([prompt], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
print(before, resident("VmHWM:"))
"""


def resident_bytes(model: Path) -> dict[str, Any]:
    """Resident memory at its highest while a prompt is read and answered, the interpreter and its
    libraries (measured before the model is opened) not counted."""
    result = subprocess.run(
        [sys.executable, "-c", _CHILD, str(model)], capture_output=True, text=True, check=True
    )
    before, peak = map(int, result.stdout.split())
    file_bytes = model.stat().st_size
    return {
        "file_bytes": file_bytes,
        "libraries_bytes": before,
        "model_bytes": peak - before,
        "ratio": (peak - before) / file_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    machine = describe()
    figures: dict[str, Any] = {"machine": machine, "empty_layer_us": empty_layer_us(args.threads)}
    rows: list[tuple[object, ...]] = [
        ("empty CPU layer, us", f"{figures['empty_layer_us']:.2f}", EMPTY_LAYER_BAR_US)
    ]
    if args.model is not None:
        figures["memory"] = resident_bytes(args.model)
        rows.append(
            ("resident / file size", f"{figures['memory']['ratio']:.3f}", f"{MEMORY_BAR:.2f}")
        )
    write_json(args.json, figures)
    table = markdown_table(("", "measured", "bar"), rows)
    sys.stdout.write(f"{describe_line(machine)}\n\n{table}\n")


if __name__ == "__main__":
    main()
