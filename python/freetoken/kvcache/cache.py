"""The tensors of the paged key-value cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freetoken.errors import CapacityError

_FLOAT32_BYTES = 4


def page_bytes(layers: int, page_tokens: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * layers * page_tokens * kv_heads * head_dim * _FLOAT32_BYTES


def _lazy_zeros(shape: tuple[int, ...]) -> Tensor:
    """Zeros whose memory the system provides at first touch (calloc; torch.zeros writes it all)."""
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))


class KVCache:
    """Per layer `keys[layer]` and `values[layer]`, float32 [pages, page_tokens, Hk, D].

    Page 0 belongs to padded rows. Attention reads only positions that were written, so pages are
    handed from one request to the next as they are.
    """

    def __init__(
        self, *, layers: int, pages: int, page_tokens: int, kv_heads: int, head_dim: int
    ) -> None:
        shape = (pages, page_tokens, kv_heads, head_dim)
        try:
            self.keys: tuple[Tensor, ...] = tuple(_lazy_zeros(shape) for _ in range(layers))
            self.values: tuple[Tensor, ...] = tuple(_lazy_zeros(shape) for _ in range(layers))
        except MemoryError as error:
            total = pages * page_bytes(layers, page_tokens, kv_heads, head_dim)
            raise CapacityError(
                f"the system refused {total / 2**30:.2f} GiB for {pages} key-value pages of "
                f"{page_tokens} tokens; free some memory or raise the process's limit"
            ) from error
        self.pages = pages
        self.page_tokens = page_tokens
