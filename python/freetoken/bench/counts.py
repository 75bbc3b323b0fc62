"""Options that count something."""

from __future__ import annotations

from freetoken.errors import ConfigError


def check_counts(**counts: int) -> None:
    """Raises ConfigError for the option of this name if it is below 1."""
    for name, count in counts.items():
        if count < 1:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option}: found {count}, expected 1 or more")
