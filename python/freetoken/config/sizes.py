"""Sizes of memory, in words, and of the pages of keys and values."""

from __future__ import annotations

# A page is large enough to read well, and small enough that little of a last page is wasted.
PAGE_TOKENS = 32
_MIB, _GIB = 2**20, 2**30


def pages_for(tokens: int) -> int:
    """Page 0, which is nobody's, included."""
    return -(-tokens // PAGE_TOKENS) + 1


def size(size_bytes: int) -> str:
    """For messages: "5.25 GiB", or "300.0 MiB"."""
    if size_bytes >= _GIB:
        return f"{size_bytes / _GIB:.2f} GiB"
    return f"{size_bytes / _MIB:.1f} MiB"
