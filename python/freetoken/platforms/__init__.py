"""Platforms, and the choice of one by the name that users give."""

from __future__ import annotations

from typing import get_args

import torch

from freetoken.config import DeviceName
from freetoken.errors import ConfigError
from freetoken.platforms.base import Platform
from freetoken.platforms.cpu import CpuPlatform

__all__ = ["CpuPlatform", "Platform", "select_platform"]


def select_platform(
    device: str, threads: int | None = None, cpu_activations: str = "int8"
) -> Platform:
    """The platform for --device; auto takes a GPU if torch has one. Raises ConfigError for one that
    is not there."""
    if device not in get_args(DeviceName):
        raise ConfigError(
            f"device: found {device!r}, expected one of {', '.join(get_args(DeviceName))}"
        )
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return CpuPlatform(threads, cpu_activations)
    has = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu alone"
    if device not in ("auto", has) or not torch.cuda.is_available():
        raise ConfigError(
            f"device {device!r}: this torch is built for {has} and sees "
            f"{torch.cuda.device_count()} GPUs; install torch for your GPU, see what `ft doctor` "
            "says, or use --device cpu"
        )
    try:
        from freetoken.platforms.gpu import GpuPlatform
    except ImportError as error:
        raise ConfigError(
            f"device {device!r}: GPU kernels need triton ({error}); pip install triton, "
            "or use --device cpu"
        ) from error
    return GpuPlatform(torch.device("cuda", torch.cuda.current_device()), threads, cpu_activations)
