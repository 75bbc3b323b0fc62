"""From what a user names, a path or a hub id, to an open checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from freetoken.checkpoints import hub
from freetoken.checkpoints.base import Checkpoint
from freetoken.checkpoints.gguf import open_gguf, part_names
from freetoken.checkpoints.gguf_header import MAGIC
from freetoken.checkpoints.mapping import access_error, read_start
from freetoken.checkpoints.safetensors import open_safetensors
from freetoken.errors import CheckpointError, shown

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def open_checkpoint(path_or_hub_id: str | Path) -> Checkpoint:
    """Open a GGUF file, a directory, or a repository of the Hugging Face hub.

    A local path always wins. Otherwise `owner/name` means a repository of safetensors and
    `owner/name:file.gguf` or `owner/name/file.gguf` one GGUF model of a repository; they are
    downloaded into the hub's own cache. Raises CheckpointError.
    """
    _require_path(path_or_hub_id)
    path = Path(os.path.expanduser(path_or_hub_id))
    if str(path_or_hub_id) and _exists(path):
        return _open_path(path)
    reference = hub.parse(path_or_hub_id) if isinstance(path_or_hub_id, str) else None
    if reference is None:
        raise CheckpointError(
            "no such file or directory",
            file=path,
            found="nothing",
            expected="a GGUF file, a directory with safetensors, or a hub id such as owner/name",
            hint="check the path; `ft models list` shows the models that are here",
        )
    return _open_path(hub.download(reference))


def _require_path(given: object) -> None:
    if isinstance(given, str) or (isinstance(given, os.PathLike) and type(os.fspath(given)) is str):
        return
    raise CheckpointError(
        "a model is named by its path or hub id",
        found=shown(given),
        expected="a str or a pathlib.Path: a GGUF file, a directory, or a hub id like owner/name",
        hint="give one of these",
    )


def _exists(path: Path) -> bool:
    """Whether there is something at `path`, be it a broken link."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise access_error(path, error) from error
    return True


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_directory(path)
    name = path.name.lower()
    if name.endswith(".gguf") or read_start(path, len(MAGIC)) == MAGIC:
        return open_gguf(path)
    if name.endswith((".safetensors", ".safetensors.index.json")):
        return open_safetensors(path)
    hint = "give a .gguf or .safetensors file, or a directory"
    raise CheckpointError(
        "not a checkpoint",
        file=path,
        found=f"a file that starts with {read_start(path, 8)!r}",
        expected="a GGUF file, a safetensors file, or a directory",
        hint=_convert_hint([path.name]) or hint,
    )


def _open_directory(directory: Path) -> Checkpoint:
    try:
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except OSError as error:
        raise access_error(directory, error) from error
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    safetensors = [
        name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))
    ]
    if ggufs and safetensors:
        raise CheckpointError(
            "the directory holds both GGUF and safetensors files",
            file=directory,
            found=_list(safetensors + ggufs),
            expected="one kind",
            hint=f"give the path of the file to load, such as {directory / ggufs[0]}",
        )
    if safetensors:
        return open_safetensors(directory)
    if ggufs and set(ggufs) <= set(part_names(ggufs[0])):
        return open_gguf(directory / ggufs[0])
    if ggufs:
        raise CheckpointError(
            "the directory holds several GGUF models",
            file=directory,
            found=_list(ggufs),
            expected="one model",
            hint=f"give the path of one file, such as {directory / ggufs[0]}",
        )
    raise CheckpointError(
        "no checkpoint in the directory",
        file=directory,
        found=_list(names) or "an empty directory",
        expected="a .gguf file, or .safetensors files with a config.json",
        hint=_convert_hint(names) or "check the path; if a download was interrupted, run it again",
    )


def _convert_hint(names: list[str]) -> str | None:
    """What to do with a checkpoint of pickled tensors, which may run code when loaded."""
    if not any(name.endswith(_PICKLE_SUFFIXES) for name in names):
        return None
    return (
        "convert it to safetensors: load it with transformers' from_pretrained and call "
        "save_pretrained(directory)"
    )


def _list(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f", ... ({len(names)} files)" if len(names) > 6 else "")
