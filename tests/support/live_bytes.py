"""How many bytes of tensors are in use, counted as they come and go."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations inside return for the first time; `peak_bytes` is the
    most that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = 0
        self.peak_bytes = 0
        self._seen: set[int] = set()

    def know(self, *tensors: Tensor) -> None:
        """Storages that were there before, and are not counted."""
        self._seen.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {leaf.untyped_storage()._cdata for leaf in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen and storage._cdata not in before:
                self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.now_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._remove, key, size_bytes)

    def _remove(self, key: int, size_bytes: int) -> None:
        self._seen.discard(key)
        self.now_bytes -= size_bytes


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
