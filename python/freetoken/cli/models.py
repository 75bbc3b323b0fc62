"""`ft models`: what lies in FreeToken's cache and in the hub's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from freetoken.config import read_environment
from freetoken.errors import ConfigError


@dataclass(frozen=True)
class CachedModel:
    """A model on disk that `ft generate --model` takes by this name or path."""

    name: str
    path: Path
    bytes: int
    origin: str


def cached_models() -> list[CachedModel]:
    """All models of both caches, by name."""
    return sorted([*_own(), *_from_hub()], key=lambda model: model.name)


def show_list() -> None:
    """A table on a terminal; tab-separated lines otherwise, for scripts."""
    models = cached_models()
    if not sys.stdout.isatty():
        for model in models:
            sys.stdout.write(f"{model.name}\t{model.bytes}\t{model.origin}\t{model.path}\n")
        return
    if not models:
        Console().print(f"No models yet in {read_environment().home}. `ft demo` builds one.")
        return
    table = Table("model", "size", "from", "path")
    for model in models:
        table.add_row(model.name, f"{model.bytes / 1e6:,.0f} MB", model.origin, str(model.path))
    Console().print(table)


def show_path(name: str | None) -> None:
    """The cache folder, or the path of the named model. Raises ConfigError for an unknown name."""
    if name is None:
        sys.stdout.write(f"{read_environment().home}\n")
        return
    known = {model.name: model for model in cached_models()}
    if name not in known:
        raise ConfigError(
            f"no model named {name!r} in the cache\n"
            f"  found:    {', '.join(known) or 'no models'}\n"
            f"  what to do: give one of these names; `ft demo` builds the demo model"
        )
    sys.stdout.write(f"{known[name].path}\n")


def _own() -> list[CachedModel]:
    files = (f for f in (read_environment().home / "models").glob("*.gguf") if f.is_file())
    return [CachedModel(f.stem, f, f.stat().st_size, "freetoken") for f in files]


def _from_hub() -> list[CachedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        CachedModel(repo.repo_id, repo.repo_path, repo.size_on_disk, "hub")
        for repo in repos
        if repo.repo_type == "model"
    ]
