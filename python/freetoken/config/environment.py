"""The environment variables that FreeToken knows. The only module that reads any."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from freetoken.errors import ConfigError

_HOME = "FREETOKEN_HOME"


@dataclass(frozen=True)
class Environment:
    """What the variables say. `home_value` is the folder for FreeToken's own as `home_variable` has
    it, looked at when it is asked for: a model in another place needs no such folder."""

    overlap: bool
    home_variable: str
    home_value: str

    @property
    def home(self) -> Path:
        """Absolute, so that it is the same folder wherever a command is started. ConfigError if the
        value gives none."""
        try:
            path = Path(self.home_value).expanduser()
        except RuntimeError as error:
            raise self.wrong_home(str(error)) from error
        if not path.is_absolute():
            raise self.wrong_home(f"a relative path; did you mean {path.absolute()}?")
        return path

    def wrong_home(self, found: str) -> ConfigError:
        other_way = "unset it" if self.home_variable == _HOME else f"mend {self.home_variable}"
        return ConfigError(
            f"models cannot be kept where {self.home_variable} says, {self.home_value[:200]!r}\n"
            f"  found:    {found}\n"
            "  expected: the absolute path of a folder, or one that can be made\n"
            f"  what to do: set {_HOME} to another folder, or {other_way}"
        )


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """FREETOKEN_HOME (where models are kept; XDG_CACHE_HOME or HOME where it is not set) and
    FREETOKEN_HYBRID_OVERLAP (0: measure the hybrid strategy without overlap). ConfigError names the
    variable that cannot be read."""
    env = os.environ if variables is None else variables
    overlap = env.get("FREETOKEN_HYBRID_OVERLAP", "1").strip().lower()
    if overlap not in ("0", "1"):
        raise ConfigError(
            f"the environment variable FREETOKEN_HYBRID_OVERLAP is {overlap!r}; "
            "set it to 0 or 1, or unset it"
        )
    if home := env.get(_HOME):
        return Environment(overlap == "1", _HOME, home)
    if cache := env.get("XDG_CACHE_HOME"):
        return Environment(overlap == "1", "XDG_CACHE_HOME", f"{cache}/freetoken")
    return Environment(overlap == "1", "HOME", "~/.cache/freetoken")


def models_folder() -> Path:
    """Where FreeToken keeps models; it may not exist yet. ConfigError if it cannot."""
    environment = read_environment()
    home = environment.home
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(home).st_mode):
                raise environment.wrong_home("a file")
    except OSError as error:
        raise environment.wrong_home(error.strerror or str(error)) from error
    return home / "models"
