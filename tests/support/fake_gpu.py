"""GPU drivers without a GPU: the fake libraries of tests/native, their streams and their graphs.

Device memory is host memory there, so CPU tensors stand for tensors on the device.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

SOURCES = Path(__file__).parents[1] / "native" / "fake_driver"

UNSUPPORTED, OPERATION_FAILS, CALLBACK_NEVER_RUNS, DEVICE_RESET = 1, 2, 128, 256
WAIT_NEVER_ENDS = 2048


def build_fake_driver(vendor: str, directory: Path) -> Path:
    """The library of "cuda" or "hip", compiled with CXX or c++."""
    library = directory / f"libfake_{vendor}.so"
    sources = [str(SOURCES / f"{name}.cpp") for name in (vendor, "device")]
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
    subprocess.run([compiler, *flags, *sources, "-o", str(library)], check=True)
    return library


class FakeGpu:
    """GpuStreams over a fake driver, with one stream; copies are the driver's."""

    CUDA: ClassVar = {
        "create": "cuStreamCreate",
        "destroy": "cuStreamDestroy_v2",
        "synchronize": "cuStreamSynchronize",
        "copy": "cuMemcpyAsync",
        "begin": "cuStreamBeginCapture_v2",
        "end": "cuStreamEndCapture",
        "launch": "cuGraphLaunch",
        "free_graph": "cuGraphDestroy",
        "free_executable": "cuGraphExecDestroy",
    }
    HIP: ClassVar = {
        "create": "hipStreamCreateWithFlags",
        "destroy": "hipStreamDestroy",
        "synchronize": "hipStreamSynchronize",
        "copy": "hipMemcpyAsync",
        "begin": "hipStreamBeginCapture",
        "end": "hipStreamEndCapture",
        "launch": "hipGraphLaunch",
        "free_graph": "hipGraphDestroy",
        "free_executable": "hipGraphExecDestroy",
    }

    def __init__(self, vendor: str, library: Path) -> None:
        self.vendor = vendor
        self.path = str(library)
        self._library = ctypes.CDLL(self.path)
        self._names = self.CUDA if vendor == "cuda" else self.HIP
        self._capturing = False
        self._copied: list[Tensor] = []  # a stream's copies come later than the call
        self._kept = False  # graphs read their sources for as long as they are replayed
        self.pinned_calls = 0
        self.set_faults(0)
        stream = ctypes.c_void_p()
        self._call("create", ctypes.byref(stream), 0)
        self._stream = stream

    def set_faults(self, faults: int) -> None:
        self._library.fake_set_fault(faults)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.pinned_calls += 1
        return torch.zeros(shape, dtype=dtype)

    def current(self) -> int:
        return self._stream.value or 0

    def capturing(self) -> bool:
        return self._capturing

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        assert target.is_contiguous() and source.is_contiguous()
        self._copied += [target, source]
        addresses = ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr())
        kind = () if self.vendor == "cuda" else (4,)
        self._call("copy", *addresses, ctypes.c_size_t(source.nbytes), *kind, self._stream)

    def synchronize(self) -> None:
        self._call("synchronize", self._stream)
        if not self._kept:
            self._copied.clear()

    def begin_capture(self) -> None:
        self._call("begin", self._stream, 1)
        self._capturing = self._kept = True

    def end_capture(self) -> FakeGraph:
        self._capturing = False
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("end", self._stream, ctypes.byref(graph))
        if self.vendor == "cuda":
            instantiate = self._library.cuGraphInstantiateWithFlags
            code = instantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        else:
            instantiate = self._library.hipGraphInstantiate
            code = instantiate(ctypes.byref(executable), graph, None, None, ctypes.c_size_t(0))
        assert code == 0, code
        self._call("free_graph", graph)
        return FakeGraph(self, executable)

    def close(self) -> None:
        self.set_faults(0)
        self._call("destroy", self._stream)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, self._names[name])(*arguments)
        if code != 0:
            raise RuntimeError(f"{self._names[name]} gave {code}")


class FakeGraph:
    """What was captured, to be replayed on the same stream."""

    def __init__(self, gpu: FakeGpu, executable: ctypes.c_void_p) -> None:
        self._gpu = gpu
        self._executable = executable

    def launch(self) -> None:
        self._gpu._call("launch", self._executable, self._gpu._stream)

    def close(self) -> None:
        self._gpu._call("free_executable", self._executable)
