"""The compiled expert kernels of the freetoken 0.2.1 wheel behind a pipe (see wheel_process in
vs_wheel.py). Runs in a process of its own: its library and ours have one name.

    argv: FOLDER (the unpacked wheel) format hidden intermediate experts top_k layers threads
    each line on stdin: a number of calls  -> a JSON list of GB/s, one per call
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

_GGUF = {"Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210)}
_E8M0, _E4M3 = 120, 0x38
Banks = tuple[str, dict[str, list[torch.Tensor]], dict[str, int]]


class Shape:
    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, layers: int) -> None:
        self.hidden, self.inner, self.experts = hidden, inner, experts
        self.top_k, self.layers = top_k, layers

    def random(self, *shape: int, below: int = 256) -> list[torch.Tensor]:
        size = (self.experts, *shape)
        return [torch.randint(0, below, size, dtype=torch.uint8) for _ in range(self.layers)]

    def full(
        self, value: float, *shape: int, dtype: torch.dtype = torch.uint8
    ) -> list[torch.Tensor]:
        size = (self.experts, *shape)
        return [torch.full(size, value, dtype=dtype) for _ in range(self.layers)]

    def normal(self, *shape: int) -> list[torch.Tensor]:
        size = (self.experts, *shape)
        return [torch.randn(size, dtype=torch.bfloat16) * 0.02 for _ in range(self.layers)]


def banks(name: str, s: Shape) -> Banks:
    """The wheel's name of the format, its tensors (a list over layers each), its options."""
    h, i = s.hidden, s.inner
    if name == "BF16":
        return "bf16", {"gate_up": s.normal(2 * i, h), "down": s.normal(h, i)}, {}
    if name == "NVFP4":
        tensors = {
            "gate_up": s.random(2 * i, h // 2),
            "gate_up_scale": s.full(_E4M3, 2 * i, h // 16),
            "gate_up_global": s.full(0.01, 2 * i, dtype=torch.float32),
            "down": s.random(h, i // 2),
            "down_scale": s.full(_E4M3, h, i // 16),
            "down_global": s.full(0.01, h, dtype=torch.float32),
        }
        return "nvfp4", tensors, {}
    if name == "MXFP4":
        tensors = {
            "gate_up": s.random(h // 2, 2 * i),
            "gate_up_scale": s.full(_E8M0, h // 32, 2 * i),
            "gate_up_bias": s.full(0, 2 * i, dtype=torch.bfloat16),
            "down": s.random(i // 2, h),
            "down_scale": s.full(_E8M0, i // 32, h),
            "down_bias": s.full(0, h, dtype=torch.bfloat16),
        }
        return "mxfp4_triton", tensors, {}
    if name == "DS_FP4":
        tensors = {
            "gate_up": s.random(2 * i, h // 2),
            "gate_up_scale": s.full(_E8M0, 2 * i, h // 32),
            "down": s.random(h, i // 2),
            "down_scale": s.full(_E8M0, h, i // 32),
        }
        return "ds_fp4", tensors, {"act_block": 128, "input_prequant": 0}
    kind, block, block_bytes = _GGUF[name]
    tensors = {
        "gate_up": s.random(2 * i, h // block * block_bytes, below=60),
        "down": s.random(h, i // block * block_bytes, below=60),
    }
    return "gguf", tensors, {"gate_up_type": kind, "down_type": kind}


def load(folder: Path, pattern: str) -> Any:
    found = sorted(folder.glob(pattern))
    if not found:
        raise SystemExit(f"{folder}: no {pattern}; unpack the freetoken 0.2.1 wheel there")
    spec = importlib.util.spec_from_file_location(found[0].name.split(".")[0], found[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Executor:
    def __init__(self, folder: Path, name: str, shape: Shape, threads: int) -> None:
        extension = load(folder, "freetoken/kernel/_cpu_moe*.so")
        kind, self._tensors, options = banks(name, shape)
        if kind == "gguf":
            variant = load(folder, "freetoken/kernel/ggml_cpu/_haswell*.so")
            extension.set_ggml_cpu(variant.api() if callable(variant.api) else variant.api)
        self._tables = {
            part: torch.tensor([t.data_ptr() for t in layers])
            for part, layers in self._tensors.items()
        }
        self._shape = shape
        self._x = torch.randn(1, shape.hidden).bfloat16()
        self._y = torch.zeros(1, shape.hidden).bfloat16()
        self._ids = torch.zeros(1, shape.top_k, dtype=torch.int32)
        self._weights = torch.full((1, shape.top_k), 1 / shape.top_k)
        addresses = {part: table.data_ptr() for part, table in self._tables.items()}
        self._executor = extension.CpuMoeExecutor(
            *(
                threads,
                shape.layers,
                shape.experts,
                shape.top_k,
                shape.hidden,
                shape.inner,
                1,
                0,
                0,
            ),
            *([(kind, addresses, options)], [0] * shape.layers, 1.702, float("inf")),
            list(range(threads)),
            *(t.data_ptr() for t in (self._x, self._ids, self._weights, self._y)),
        )
        self._executor.set_spin_wait(True)
        self.isa = self._executor.isa_name()
        expert_bytes = sum(t[0][0].numel() * t[0].element_size() for t in self._tensors.values())
        self._bytes = expert_bytes * shape.top_k
        self._layer = 0

    def call(self) -> float:
        """GB/s of one decode step with random experts."""
        self._ids[0] = torch.randperm(self._shape.experts)[: self._shape.top_k].int()
        self._layer = (self._layer + 1) % self._shape.layers
        start = time.perf_counter()
        self._executor.run(self._layer, 1)
        return self._bytes / (time.perf_counter() - start) * 1e-9


def main() -> None:
    folder, name, *numbers = sys.argv[1:]
    *sizes, threads = map(int, numbers)
    executor = Executor(Path(folder), name, Shape(*sizes), threads)
    sys.stdout.write(json.dumps(executor.isa) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps([executor.call() for _ in range(int(line))]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
