"""Build the demo model once, into the user's cache, so that only a whole file is ever used."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from freetoken.config import models_folder
from freetoken.demo.source import MEMBER_BYTES, dense_model
from freetoken.errors import FreeTokenError
from freetoken.writing import remedy, tidy_ends

MODEL_NAME = "demo-8x135m-v1.gguf"
MODEL_BYTES = 726_000_000  # what the build writes, for the check of free space
DEMO_DESCRIPTION = (
    "SmolLM2-135M-Instruct with each feed-forward layer copied into 8 experts, with 2% noise and a "
    "random router (sparse upcycling, not trained further): it shows the engine at work, and is "
    "no better a model than the one it came from"
)
_PARTIAL = ".partial-"

Progress = Callable[[str, int, int], None]
"""Called as progress(step, done_bytes, total_bytes)."""


def demo_model_path() -> Path:
    """Where the demo model lies, or will lie."""
    return models_folder() / MODEL_NAME


def ensure_demo_model(progress: Progress) -> Path:
    """The demo model's path, built first if need be.

    The build goes into a folder of its own, is flushed to disk and renamed at the end: a killed or
    failed build leaves nothing under the final name, and the next one clears away its remains. A
    lock makes two builds at the same moment one. Raises FreeTokenError with what to do if the
    source cannot be had or the disk is full.
    """
    final = demo_model_path()
    if final.is_file():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent / ".build.lock"):
            if not final.is_file():
                _build(final, progress)
    except OSError as error:
        raise _explained(error, final.parent) from error
    return final


def _build(final: Path, progress: Progress) -> None:
    from freetoken.demo.upcycle import upcycle

    for stale in final.parent.glob(_PARTIAL + "*"):
        shutil.rmtree(stale, ignore_errors=True)
    _check_space(final.parent)
    with _scratch(final.parent) as scratch:
        progress("fetching the dense model", 0, MEMBER_BYTES)
        dense = dense_model(scratch)
        progress("fetching the dense model", MEMBER_BYTES, MEMBER_BYTES)
        made = scratch / MODEL_NAME
        upcycle(
            dense,
            made,
            DEMO_DESCRIPTION,
            lambda done, total: progress("writing experts", done, total),
        )
        _publish(made, final)


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, also after a signal that asks the process to end."""
    with tidy_ends():
        scratch = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=parent))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _publish(made: Path, final: Path) -> None:
    """Rename only after the bytes are on disk, and make the rename itself durable."""
    with made.open("rb+") as file:
        os.fsync(file.fileno())
    made.replace(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_space(folder: Path) -> None:
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes != resource.RLIM_INFINITY and limit_bytes < MODEL_BYTES:
        raise OSError(
            errno.EFBIG,
            f"files may have {limit_bytes / 1e6:.0f} MB here, {MODEL_BYTES / 1e6:.0f} MB needed",
        )
    needed_bytes = MODEL_BYTES + 2 * MEMBER_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise OSError(
            errno.ENOSPC, f"{free_bytes / 1e6:.0f} MB free, {needed_bytes / 1e6:.0f} MB needed"
        )


def _explained(error: OSError, folder: Path) -> FreeTokenError:
    needed_mb = (MODEL_BYTES + 2 * MEMBER_BYTES) / 1e6
    return FreeTokenError(
        f"the demo model could not be built in {folder}\n"
        f"  found:    {error.strerror or error}\n"
        f"  expected: a writable folder with about {needed_mb:.0f} MB free\n"
        f"  what to do: {remedy(error)}, or point FREETOKEN_HOME at a folder on another disk; "
        f"nothing half-written was left behind"
    )
