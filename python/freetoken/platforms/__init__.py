"""Platforms, and the choice of one by the name that users give."""

from __future__ import annotations

from freetoken.errors import ConfigError
from freetoken.platforms.base import Platform
from freetoken.platforms.cpu import CpuPlatform

__all__ = ["CpuPlatform", "Platform", "select_platform"]


def select_platform(
    device: str, threads: int | None = None, cpu_activations: str = "int8"
) -> Platform:
    """The platform for --device. Raises ConfigError for one that this version cannot use."""
    if device in ("auto", "cpu"):
        return CpuPlatform(threads, cpu_activations)
    if device == "cuda":
        raise ConfigError(
            "device 'cuda': this version has no GPU kernels yet; use --device cpu (or auto)"
        )
    raise ConfigError(f"device: found {device!r}, expected auto, cpu or cuda")
