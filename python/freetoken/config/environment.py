"""The environment variables that FreeToken knows. The only module that reads any."""

from __future__ import annotations

import contextlib
import os
import stat
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
        return Environment(_home(home), overlap == "1")
    cache = Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Environment(cache / "freetoken", overlap == "1")


def _home(value: str) -> Path:
    """Absolute, so that it is the same folder wherever a command is started."""
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        raise _wrong_home(value, str(error)) from error
    if not path.is_absolute():
        raise _wrong_home(value, f"a relative path; did you mean {path.absolute()}?")
    return path


def models_folder() -> Path:
    """Where FreeToken keeps models; it may not exist yet. ConfigError if it cannot."""
    home = read_environment().home
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(home).st_mode):
                raise _wrong_home(str(home), "a file")
    except OSError as error:
        raise _wrong_home(str(home), error.strerror or str(error)) from error
    return home / "models"


def _wrong_home(value: str, found: str) -> ConfigError:
    return ConfigError(
        f"models cannot be kept in FREETOKEN_HOME, {value[:200]!r}\n"
        f"  found:    {found}\n"
        "  expected: the absolute path of a folder, or one that can be made\n"
        "  what to do: set FREETOKEN_HOME to another folder, or unset it"
    )
