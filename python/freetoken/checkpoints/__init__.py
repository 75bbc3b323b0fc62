"""Checkpoints: named tensors as views over memory maps, and metadata."""

from __future__ import annotations

from freetoken.checkpoints.base import Checkpoint, TensorEntry
from freetoken.checkpoints.opening import open_checkpoint

__all__ = ["Checkpoint", "TensorEntry", "open_checkpoint"]
