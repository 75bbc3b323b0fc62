"""The tensors of the paged key-value cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freetoken.errors import CapacityError
from freetoken.kvcache.allocator import pages_for

_HOST = torch.device("cpu")


def page_bytes(
    layers: int,
    page_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * layers * page_tokens * kv_heads * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """On the host the system provides the memory at first touch (calloc; torch.zeros writes it)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape, dtype.itemsize), dtype=np.uint8)).view(dtype)[..., 0]


class KVCache:
    """Per layer `keys[layer]` and `values[layer]`, [pages, page_tokens, Hk, D] of `dtype`.

    Page 0 belongs to padded rows. Attention reads only positions that were written, so pages are
    handed from one request to the next as they are.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_tokens: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device = _HOST,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (pages, page_tokens, kv_heads, head_dim)
        try:
            self.keys = tuple(_zeros(shape, device, dtype) for _ in range(layers))
            self.values = tuple(_zeros(shape, device, dtype) for _ in range(layers))
        except (MemoryError, torch.OutOfMemoryError) as error:
            total = pages * page_bytes(layers, page_tokens, kv_heads, head_dim, dtype)
            raise CapacityError(
                f"{device} refused {total / 2**30:.2f} GiB for {pages} key-value pages of "
                f"{page_tokens} tokens; free some of its memory, use a shorter context, or raise "
                "the process's limit"
            ) from error
        self.pages = pages
        self.page_tokens = page_tokens

    def most_pages(self, context_tokens: int) -> int:
        """Pages of the longest sequence that there can be."""
        return min(self.pages, pages_for(context_tokens, self.page_tokens))
