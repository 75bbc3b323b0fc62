"""Tests that need a GPU. Each has a time limit: what hangs there hangs in the driver, where only
ending the process helps."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest
import torch
from _pytest import faulthandler as pytest_faulthandler

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated
    from support.interpreter import patch_once_per_launch

    patch_once_per_launch()

from gpu_device import Device

from freetoken.platforms.gpu import GpuPlatform
from support.gpu_rig import DRY, make_device

TIME_LIMIT_SECONDS = 900 if DRY else 150  # compiling kernels takes most of it


def take_own_processors() -> None:
    """Of several processes of pytest-xdist each has a share: their CPU workers are pinned, and
    would all be on the first processors."""
    name, count = (os.environ.get(f"PYTEST_XDIST_WORKER{suffix}", "") for suffix in ("", "_COUNT"))
    allowed = sorted(os.sched_getaffinity(0))
    if name.startswith("gw") and count.isdigit() and len(allowed) >= 2 * int(count):
        os.sched_setaffinity(0, allowed[int(name[2:]) % int(count) :: int(count)])


take_own_processors()


@pytest.fixture(autouse=True)
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    stash, key = request.config.stash, pytest_faulthandler.fault_handler_stderr_fd_key
    stderr = stash.get(key, 2)  # not the one that is captured
    faulthandler.dump_traceback_later(TIME_LIMIT_SECONDS, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def device() -> Device:
    return make_device()


@pytest.fixture(scope="module")
def platform(device: Device) -> Iterator[GpuPlatform]:
    """With few CPU threads, whose kernels multiply exact activations."""
    platform = device.platform(2, "exact")
    yield platform
    platform.close()
