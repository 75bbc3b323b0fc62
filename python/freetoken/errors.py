"""Errors that users meet. Each names what was found, what was expected and the way out."""

from __future__ import annotations

from pathlib import Path


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
