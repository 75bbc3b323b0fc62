"""Compiles every case of `freetoken.kernels.triton` for every GPU target, on a machine without one.

    python compile_triton.py [--report]

Prints one line per failure, and exits with 1 if there is any. A case fails too if it asks for more
shared memory than a program of that target may have. `--report` prints a line for every case: its
shared memory, registers and spills. Run it without TRITON_INTERPRET, and with TRITON_CACHE_DIR
naming an empty folder.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import freetoken.kernels.triton as package
from freetoken.kernels.triton.compile_cases import CompileCase


@dataclass(frozen=True)
class Target:
    name: str
    gpu: GPUTarget
    shared_bytes: int  # that one program may have


TARGETS = (
    Target("sm_80", GPUTarget("cuda", 80, 32), 163 * 1024),
    Target("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024),
    Target("sm_120", GPUTarget("cuda", 120, 32), 99 * 1024),
    Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024),
    Target("gfx1100", GPUTarget("hip", "gfx1100", 32), 64 * 1024),
    Target("gfx1201", GPUTarget("hip", "gfx1201", 32), 64 * 1024),
)
ALIGNED = [["tt.divisibility", 16]]  # as every pointer to a tensor is


def all_cases() -> list[tuple[str, CompileCase]]:
    """Every case with the module that has it."""
    found = []
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        cases = getattr(importlib.import_module(module.name), "COMPILE_CASES", [])
        found += [(module.name.removeprefix(f"{package.__name__}."), case) for case in cases]
    return found


CASES = all_cases()


def source(case: CompileCase) -> ASTSource:
    names = case.kernel.arg_names
    given = {*case.signature, *case.constants}
    if given != set(names):
        raise ValueError(f"arguments {sorted(given ^ set(names))} are given or wanted, not both")
    return ASTSource(
        case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={
            (names.index(name),): ALIGNED
            for name, kind in case.signature.items()
            if kind.startswith("*")
        },
    )


def compile_case(job: tuple[int, int]) -> tuple[str, str, str]:
    """What was compiled, its failure ("" for none), and what it needs."""
    (module, case), target = CASES[job[0]], TARGETS[job[1]]
    label = f"{target.name} {module}: {case.name}"
    try:
        kernel = triton.compile(source(case), target=target.gpu, options=dict(case.options))
    except Exception as error:  # whatever the compiler says is the result
        return label, f"{type(error).__name__}: {error}".replace("\n", " ")[:500], ""
    shared = kernel.metadata.shared
    if shared > target.shared_bytes:
        return label, f"{shared} bytes of shared memory of {target.shared_bytes}", ""
    return label, "", f"shared {shared}, {resources(kernel.asm)}" if "--report" in sys.argv else ""


def resources(binaries: Any) -> str:
    """Registers and spills, as the binary has them."""
    if "amdgcn" in binaries:
        counts = re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", binaries["amdgcn"])
        return ", ".join(f"{name} {count}" for name, count in counts)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binaries["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True)
    return " ".join(re.findall(r"(?:REG|STACK|LOCAL):\d+", output.stdout + output.stderr))


def main() -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    jobs = [(case, target) for case in range(len(CASES)) for target in range(len(TARGETS))]
    failures = 0
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for label, failure, needs in pool.imap_unordered(compile_case, jobs):
            failures += bool(failure)
            if failure or needs:
                print(f"{label}: {failure or needs}", flush=True)
    print(f"triton {triton.__version__}: {len(jobs) - failures} of {len(jobs)} compiled")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
