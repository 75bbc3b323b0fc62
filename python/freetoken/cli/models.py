"""`ft models`: what lies in FreeToken's cache and in the hub's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from freetoken.checkpoints.gguf import part_names
from freetoken.config import models_folder
from freetoken.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo


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
        Console().print(f"No models yet in {models_folder().parent}. `ft demo` builds one.")
        return
    table = Table("model", "size", "from")
    table.add_column("path", overflow="fold")  # to be copied
    for model in models:
        table.add_row(model.name, f"{model.bytes / 1e6:,.0f} MB", model.origin, str(model.path))
    Console().print(table)


def show_path(name: str | None) -> None:
    """The cache folder, or the path of the named model. Raises ConfigError for an unknown name."""
    if name is None:
        sys.stdout.write(f"{models_folder().parent}\n")
        return
    known = {model.name: model for model in cached_models()}
    if name not in known:
        raise ConfigError(
            f"no model named {name!r} in the cache\n"
            f"  found:    {', '.join(known) or 'no models'}\n"
            f"  what to do: give one of these names; `ft demo` builds the demo model"
        )
    sys.stdout.write(f"{known[name].path}\n")


def find_model(name: str) -> str:
    """What `--model` says, as the path of FreeToken's own model if it is the name of one. A local
    path wins; all else is left to the loader."""
    if os.path.lexists(os.path.expanduser(name)) or "/" in name or not name:
        return name
    return next((str(model.path) for model in _own() if model.name == name), name)


def _own() -> list[CachedModel]:
    return [
        CachedModel(file.stem, file, _bytes(file.parent, file.name), "freetoken")
        for file in models_folder().glob("*.gguf")
        if file.is_file() and part_names(file.name)[0] == file.name
    ]


def _bytes(folder: Path, name: str) -> int:
    """Of a model that may have parts."""
    parts = (folder / part for part in part_names(name))
    return sum(part.stat().st_size for part in parts if part.is_file())


def _from_hub() -> list[CachedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        model
        for repo in repos
        if repo.repo_type == "model" and repo.revisions
        for model in _of_snapshot(repo.repo_id, _newest(repo.revisions))
    ]


def _newest(revisions: Iterable[CachedRevisionInfo]) -> Path:
    """The snapshot that a hub id means: of the branch "main", else the last one fetched."""
    newest = max(revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))
    return newest.snapshot_path


def _of_snapshot(repository: str, snapshot: Path) -> Iterator[CachedModel]:
    """What can be loaded of it: its safetensors by the repository's name, each GGUF by its own."""
    tensors = [file for file in snapshot.glob("*.safetensors") if file.is_file()]
    if tensors and (snapshot / "config.json").is_file():
        size = sum(file.stat().st_size for file in tensors)
        yield CachedModel(repository, snapshot, size, "hub")
    for file in sorted(snapshot.rglob("*.gguf")):
        if file.is_file() and part_names(file.name)[0] == file.name:
            name = f"{repository}:{file.relative_to(snapshot)}"
            yield CachedModel(name, file, _bytes(file.parent, file.name), "hub")
