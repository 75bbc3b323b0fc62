"""Paged key-value cache: page bookkeeping, and the tensors that the pages lie in."""

from freetoken.kvcache.allocator import PageAllocator, pages_for
from freetoken.kvcache.cache import KVCache, page_bytes

__all__ = ["KVCache", "PageAllocator", "page_bytes", "pages_for"]
