"""Typed reading of a checkpoint's metadata. A wrong or missing value is a CheckpointError that
names the key, what was found and what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from freetoken.checkpoints.base import Checkpoint
from freetoken.errors import CheckpointError


@dataclass(frozen=True)
class Fields:
    """The keys of one file, or of one object inside it.

    `prefix` is what errors (and GGUF keys) have before the key: "llama." or "rope_scaling.".
    """

    values: Mapping[str, Any]
    file: Path
    prefix: str = ""

    @staticmethod
    def of(checkpoint: Checkpoint) -> Fields:
        """The content of config.json, or the GGUF keys of the file's architecture."""
        if checkpoint.kind == "safetensors":
            return Fields(checkpoint.metadata, checkpoint.path / "config.json")
        prefix = f"{checkpoint.metadata['general.architecture']}."
        values = {
            key.removeprefix(prefix): value
            for key, value in checkpoint.metadata.items()
            if key.startswith(prefix)
        }
        return Fields(values, checkpoint.path, prefix)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`; an array must hold one value many times (GGUF has
        per-layer arrays). Without a default the key must be there."""
        value = self._value(key, default)
        if isinstance(value, (list, tuple, np.ndarray)) and len(value) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
            raise self.error(key, expected=f"an integer of at least {minimum}")
        return int(value)

    def optional_integer(self, key: str) -> int | None:
        """As `integer`, or None if the key is missing or null."""
        return self.integer(key) if self.has(key) else None

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number, above zero unless `positive` is off."""
        value = self._value(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, Real)
            or not math.isfinite(float(value))
        ):
            raise self.error(key, expected="a finite number")
        if positive and not float(value) > 0:
            raise self.error(key, expected="a number above zero")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, (bool, np.bool_)):
            raise self.error(key, expected="true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, expected="a string")
        return value

    def array(self, key: str) -> list[Any]:
        value = self._value(key, None)
        if not isinstance(value, (list, tuple)):
            raise self.error(key, expected="an array")
        return list(value)

    def inside(self, key: str) -> Fields:
        """The fields of an object under `key`."""
        value = self._value(key, None)
        if not isinstance(value, Mapping):
            raise self.error(key, expected="an object")
        return Fields(value, self.file, f"{self.prefix}{key}.")

    def require(self, key: str, allowed: tuple[Any, ...], hint: str) -> None:
        """Refuse a value other than the allowed ones; a missing key is allowed."""
        if self.has(key) and self.values[key] not in allowed:
            shown = " or ".join(repr(value) for value in allowed)
            raise self.error(key, expected=shown, hint=hint)

    def error(self, key: str, *, expected: object, hint: str | None = None) -> CheckpointError:
        found = repr(self.values[key]) if key in self.values else "no such key"
        return CheckpointError(
            f"key {self.prefix + key!r} cannot be used",
            file=self.file,
            found=found[:200],
            expected=expected,
            hint=hint or "check that the file is complete and was written by a known converter",
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, expected="a value")
        return value
