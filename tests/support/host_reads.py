"""A guard against values that travel from the device to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


class HostReads(torch.overrides.TorchFunctionMode):
    """Fails on anything that would bring a device value to the host."""

    FORBIDDEN = frozenset(
        {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "nonzero", "unique"}
    )

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        assert func.__name__ not in self.FORBIDDEN, f"{func.__name__} reads a device value"
        return func(*args, **(kwargs or {}))
