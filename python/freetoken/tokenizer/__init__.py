"""Text to token ids and back."""

from __future__ import annotations

from freetoken.checkpoints.base import Checkpoint
from freetoken.tokenizer.base import Tokenizer
from freetoken.tokenizer.gguf import load_gguf_tokenizer
from freetoken.tokenizer.hf import load_hf_tokenizer
from freetoken.tokenizer.stream import IncrementalDecoder

__all__ = ["IncrementalDecoder", "Tokenizer", "load_tokenizer"]


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that comes with a checkpoint. Raises CheckpointError if it cannot be used."""
    if checkpoint.kind == "gguf":
        return load_gguf_tokenizer(checkpoint)
    return load_hf_tokenizer(checkpoint)
