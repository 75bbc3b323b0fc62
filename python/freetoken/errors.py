"""Errors that users meet. Each names what was found, what was expected and the way out."""

from __future__ import annotations

import reprlib
from pathlib import Path

_SHOWN_CHARS = 100

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _SHOWN_CHARS
_repr.maxlevel = 3


def shown(value: object) -> str:
    """A value that was not expected, with its type, for a message: `[1, 'a'] (list)`. Short
    whatever the value is, and never an error of its own."""
    name = type(value).__name__
    try:
        text = _repr.repr(value)[: 2 * _SHOWN_CHARS]
    except Exception:  # of a strange __repr__, or of an integer too long to be printed
        return f"a value of type {name} that cannot be shown"
    return f"{text} ({name})"


class FreeTokenError(Exception):
    """Base of every error that FreeToken raises on purpose."""


class ConfigError(FreeTokenError, ValueError):
    """An option, argument or environment variable that cannot be used."""


class CapacityError(FreeTokenError):
    """Too little memory, too few slots or pages for what was asked; says what would fit."""


class RequestError(FreeTokenError, ValueError):
    """A prompt or sampling parameter that the loaded model cannot serve."""


class CheckpointError(FreeTokenError):
    """A checkpoint that cannot be loaded.

    The message is built from the parts, so that every one names the file, the tensor (where there
    is one), what was found, what was expected and what to do.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: Path | str | None = None,
        tensor: str | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        where = [str(file)] if file is not None else []
        if tensor is not None:
            where.append(f"tensor {tensor!r}")
        lines = [": ".join([", ".join(where), problem]) if where else problem]
        if found is not None:
            lines.append(f"  found:    {found}")
        if expected is not None:
            lines.append(f"  expected: {expected}")
        if hint is not None:
            lines.append(f"  what to do: {hint}")
        super().__init__("\n".join(lines))
        self.file = file
        self.tensor = tensor
