"""Our expert kernels and those of the freetoken 0.2.1 wheel, one decode token, in alternation.

    pip download --no-deps --only-binary=:all: -d peer freetoken==0.2.1
    unzip -q peer/freetoken-0.2.1-*.whl -d peer/wheel
    LD_LIBRARY_PATH=<cuda 13 libraries>:<site-packages>/torch/lib \\
      python benchmarks/vs_wheel.py peer/wheel

The wheel's compiled library is loaded in a process of its own (its package has our name, and needs
libraries of CUDA to be loaded at all); batches of calls of either side alternate.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import describe, describe_line, markdown_table, write_json

from freetoken.bench import ExpertShape, measure_experts
from freetoken.formats import by_name

FORMATS = ("BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4", "DS_FP4")
_LAYERS = 4
_CALLS = 40  # of one batch


def compare(folder: Path, name: str, shape: ExpertShape, *, runs: int, threads: int) -> Any:
    """Medians over all batches: GB/s of either side, and of reading beside ours."""
    sizes = (shape.hidden, shape.intermediate, shape.experts, shape.top_k, _LAYERS, threads)
    command = [sys.executable, str(Path(__file__).with_name("wheel_worker.py")), str(folder), name]
    with subprocess.Popen(
        command + [str(size) for size in sizes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        isa = _answer(process)
        ours, theirs, reads = [], [], []
        for run in range(runs + 1):
            process.stdin.write(f"{_CALLS}\n")
            process.stdin.flush()
            batch = _answer(process)
            process.send_signal(signal.SIGSTOP)  # its idle threads spin
            mine = measure_experts(by_name(name), shape, calls=_CALLS, threads=threads)
            process.send_signal(signal.SIGCONT)
            if run:  # the first batch warms up
                theirs += batch
                ours.append(mine.gbps)
                reads.append(mine.read_gbps)
        process.stdin.close()
    a, b, read = map(statistics.median, (ours, theirs, reads))
    return {
        "format": name, "freetoken_gbps": a, "wheel_gbps": b, "ratio": a / b, "read_gbps": read,
        "fraction": a / read, "isa": mine.isa, "wheel_isa": isa, "threads": threads,
    }  # fmt: skip


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the wheel's process ended with status {process.wait()}")
    return json.loads(line)


def table(results: list[Any]) -> str:
    rows = [
        (
            r["format"],
            f"{r['freetoken_gbps']:.2f}",
            f"{r['wheel_gbps']:.2f}",
            f"{r['ratio']:.2f}",
            f"{r['read_gbps']:.2f}",
            f"{r['fraction']:.2f}",
        )
        for r in results
    ]
    header = ("format", "GB/s", "wheel GB/s", "ratio", "read GB/s", "fraction of read")
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked wheel")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    machine = describe()
    results = [
        compare(args.folder, name, ExpertShape(), runs=args.runs, threads=args.threads)
        for name in args.formats
    ]
    write_json(args.json, {"machine": machine, "experts": results})
    sys.stdout.write(f"{describe_line(machine)}\n\n{table(results)}\n")


if __name__ == "__main__":
    main()
