"""The environment variables that FreeToken knows. The only module that reads any."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from freetoken.errors import ConfigError


@dataclass(frozen=True)
class Environment:
    """The environment variables that FreeToken knows."""

    home: Path
    overlap: bool


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """FREETOKEN_HOME (where models are kept) and FREETOKEN_HYBRID_OVERLAP (0: measure the hybrid
    strategy without overlap). ConfigError names the variable that cannot be read."""
    env = os.environ if variables is None else variables
    home = env.get("FREETOKEN_HOME", "")
    overlap = env.get("FREETOKEN_HYBRID_OVERLAP", "1").strip().lower()
    if overlap not in ("0", "1"):
        raise ConfigError(
            f"the environment variable FREETOKEN_HYBRID_OVERLAP is {overlap!r}; "
            "set it to 0 or 1, or unset it"
        )
    if home:
        return Environment(Path(home).expanduser(), overlap == "1")
    cache = Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Environment(cache / "freetoken", overlap == "1")
