"""What every test runs with."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # Triton's interpreter stands in for a GPU
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any test

from support.fake_gpu import FakeGpu, build_fake_driver

# A job that a shell started in the background ignores Ctrl-C, and so would the tests of it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The references are many tiny torch operations: its thread pool would take longer than the work.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fake_libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Fake GPU drivers by vendor, "cuda" and "hip"."""
    directory = tmp_path_factory.mktemp("fake_drivers")
    return {vendor: build_fake_driver(vendor, directory) for vendor in ("cuda", "hip")}


@pytest.fixture(params=["cuda", "hip"])
def gpu(request: pytest.FixtureRequest, fake_libraries: dict[str, Path]) -> Iterator[FakeGpu]:
    """A fake GPU of each vendor, without faults."""
    made = FakeGpu(request.param, fake_libraries[request.param])
    yield made
    made.close()
