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
from freetoken.errors import CheckpointError, shown

# Sizes beyond this are damage: the kernels count in 32 bits.
MAX_INTEGER = 2**31 - 1


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

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int:
        """An integer from `minimum` to `maximum`; an array must hold one value many times (GGUF has
        per-layer arrays). Without a default the key must be there."""
        value = self._value(key, default)
        if isinstance(value, (list, tuple, np.ndarray)) and len(value):
            value = value[0] if all(_same(item, value[0]) for item in value) else value
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
            raise self.error(key, expected=f"an integer of at least {minimum}")
        if int(value) > maximum:
            raise self.error(key, expected=f"an integer from {minimum} to {maximum}")
        return int(value)

    def optional_integer(self, key: str) -> int | None:
        """As `integer`, or None if the key is missing or null."""
        return self.integer(key) if self.has(key) else None

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        positive: bool = True,
        least: float = -math.inf,
        most: float = math.inf,
    ) -> float:
        """A finite number from `least` to `most`, above zero unless `positive` is off."""
        value = self._value(key, default)
        number = _finite(value)
        if number is None:
            raise self.error(key, expected="a finite number")
        if positive and not number > 0:
            raise self.error(key, expected="a number above zero")
        if not least <= number <= most:
            raise self.error(key, expected=_range(least, most))
        return number

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
        if self.has(key) and not any(_same(self.values[key], value) for value in allowed):
            wanted = " or ".join(repr(value) for value in allowed)
            raise self.error(key, expected=wanted, hint=hint)

    def error(self, key: str, *, expected: object, hint: str | None = None) -> CheckpointError:
        found = shown(self.values[key]) if key in self.values else "no such key"
        return CheckpointError(
            f"key {self.prefix + key!r} cannot be used",
            file=self.file,
            found=found,
            expected=expected,
            hint=hint or "check that the file is complete and was written by a known converter",
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, expected="a value")
        return value


def _same(value: object, other: object) -> bool:
    """Equal, and both numbers or both not: True is no 1 here, and an array equals nothing."""
    if isinstance(value, np.ndarray) or isinstance(other, np.ndarray):
        return False
    truth = (bool, np.bool_)
    return isinstance(value, truth) is isinstance(other, truth) and bool(value == other)


def _finite(value: object) -> float | None:
    """`value` as a float if it is a number that one can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _range(least: float, most: float) -> str:
    if most == math.inf:
        return f"a number of at least {least:g}"
    return f"a number from {least:g} to {most:g}" if least > -math.inf else f"at most {most:g}"
