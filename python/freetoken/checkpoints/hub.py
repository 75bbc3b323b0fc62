"""Checkpoints of the Hugging Face hub: only the files that are needed, in the hub's own cache."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path

from freetoken.checkpoints.gguf import part_names
from freetoken.errors import CheckpointError

# Configuration, tokenizer, chat template and tensors of the top directory; sub-directories hold
# the same weights in other forms ("original", "metal", "onnx").
_ALLOWED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_IGNORED = ["*/*", "consolidated*.safetensors"]

_REPOSITORY = r"(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)"
_REFERENCE = re.compile(_REPOSITORY + r"(?:[:/](?P<file>[^:]+\.gguf))?", re.ASCII)
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin")


@dataclass(frozen=True)
class HubReference:
    """A repository `owner/name`, and the path of one GGUF file in it if one was named."""

    repository: str
    file: str | None

    def __str__(self) -> str:
        return self.repository if self.file is None else f"{self.repository}:{self.file}"


def parse(text: str) -> HubReference | None:
    """`owner/name`, `owner/name:file.gguf` or `owner/name/dir/file.gguf`; None for other text."""
    match = _REFERENCE.fullmatch(text)
    if match is None or match["name"].endswith(_FILE_SUFFIXES):
        return None
    file = match["file"]
    if file is not None and any(part in ("", ".", "..") for part in file.split("/")):
        return None
    return HubReference(f"{match['owner']}/{match['name']}", file)


def download(reference: HubReference) -> Path:
    """Fetch what is not cached yet; the local directory or GGUF file. Raises CheckpointError."""
    # Imported here: local checkpoints need no hub client.
    from huggingface_hub import snapshot_download

    allowed, ignored = _patterns(reference)
    try:
        snapshot = Path(
            snapshot_download(reference.repository, allow_patterns=allowed, ignore_patterns=ignored)
        )
    except Exception as error:  # the client raises its own errors and those of its HTTP library
        raise _download_error(reference, error) from error
    if reference.file is not None:
        path = snapshot / reference.file
        if not os.path.lexists(path):
            raise CheckpointError(
                "the repository has no such file",
                file=str(reference),
                found=f"no {reference.file} in {reference.repository}",
                expected="the path of a GGUF file within the repository",
                hint=f"look up the name under the repository's files: {_page(reference)}",
            )
        return path
    if not any(snapshot.glob("*.safetensors")):
        raise CheckpointError(
            "the repository has no safetensors files",
            file=str(reference),
            found="no *.safetensors in its top directory",
            expected="a model in safetensors files, or the name of a GGUF file",
            hint=f"if it holds GGUF files, name one: {reference.repository}:FILE.gguf; "
            f"its files: {_page(reference)}",
        )
    return snapshot


def _patterns(reference: HubReference) -> tuple[list[str], list[str]]:
    if reference.file is None:
        return _ALLOWED, _IGNORED
    directory, name = os.path.split(reference.file)
    return [glob.escape(os.path.join(directory, part)) for part in part_names(name)], []


def _download_error(reference: HubReference, error: Exception) -> CheckpointError:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    problem, hint = (
        "the download from the Hugging Face hub failed",
        "check the network and the free disk space, and run the command again: it resumes",
    )
    if isinstance(error, GatedRepoError):
        problem = "the repository's licence must be accepted first"
        hint = f"accept it at {_page(reference)}, then log in with `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError):
        problem = "no local path of that name, and no such repository on the Hugging Face hub"
        hint = "check the spelling; for a private repository log in with `hf auth login`"
    elif isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        problem = (
            "no local path of that name; the Hugging Face hub cannot be reached, and its cache "
            "does not hold the whole repository"
        )
        hint = "check the network (and HF_HUB_OFFLINE), or give a local path"
    return CheckpointError(
        problem,
        file=str(reference),
        found=f"{type(error).__name__}: {error}",
        expected="a local path, or a repository owner/name that can be downloaded",
        hint=hint,
    )


def _page(reference: HubReference) -> str:
    return f"https://huggingface.co/{reference.repository}"
