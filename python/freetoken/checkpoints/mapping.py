"""Files as read-only memory maps, and the small JSON files beside them.

A map is checked against the file's size once, when it is made. If another program cuts the file
short afterwards, touching the lost pages raises SIGBUS: no user-space check can prevent that, so
replace a checkpoint by renaming a new file over it, never by writing into the old one.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from freetoken.errors import CheckpointError

_MAX_SMALL_BYTES = 100 << 20
_MAX_JSON_VALUES = 4 << 20  # an index of 200,000 tensors has 400,000
_MAX_INTEGER_DIGITS = 100
_GIT_LFS_POINTER = b"version https://git-lfs"
_DOWNLOAD_AGAIN = "the file is damaged or incomplete: download or convert it again"


@dataclass(frozen=True, eq=False)
class MappedFile:
    """A whole file. `data` is a read-only uint8 [file size] view; `map` the mmap under it."""

    path: Path
    map: mmap.mmap
    data: npt.NDArray[np.uint8]

    @property
    def bytes(self) -> int:
        return len(self.data)


def map_file(path: Path) -> MappedFile:
    """Map a regular, non-empty file. Raises CheckpointError that names the reason."""
    descriptor = _open_regular(path)
    try:
        if os.fstat(descriptor).st_size == 0:
            raise CheckpointError(
                "the file is empty",
                file=path,
                found="0 bytes",
                expected="a checkpoint",
                hint="download it again; an earlier download was probably interrupted",
            )
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "the file cannot be mapped into memory",
            file=path,
            found=str(error),
            expected="a file on a file system that supports mmap, and enough address space",
            hint="copy the file to a local disk, or raise the memory limit (ulimit -v)",
        ) from error
    finally:
        os.close(descriptor)
    if mapped[: len(_GIT_LFS_POINTER)] == _GIT_LFS_POINTER:
        raise CheckpointError(
            "a Git LFS pointer instead of the file itself",
            file=path,
            found=f"a text of {len(mapped)} bytes",
            expected="a checkpoint",
            hint="run `git lfs pull` in the repository",
        )
    ask_for_huge_pages(mapped)
    return MappedFile(path, mapped, np.frombuffer(mapped, np.uint8))


def ask_for_huge_pages(mapped: mmap.mmap) -> None:
    """Private memory, and files on file systems with large folios, then come 2 MiB at a time: they
    stream faster by what the translation of addresses takes. Elsewhere, and on kernels without huge
    pages, it does nothing."""
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)


def read_start(path: Path, count: int) -> bytes:
    """The first `count` bytes of a regular file, fewer if it is shorter."""
    descriptor = _open_regular(path)
    try:
        return os.read(descriptor, count)
    except OSError as error:
        raise access_error(path, error) from error
    finally:
        os.close(descriptor)


def read_json_object(path: Path) -> Mapping[str, Any]:
    """A JSON file that holds one object. Raises CheckpointError."""
    return parse_json_object(_read_small(path), path)


def read_text(path: Path) -> str:
    """A text in UTF-8. Raises CheckpointError."""
    content = _read_small(path)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            "the file is no text in UTF-8",
            file=path,
            found=f"{content[error.start : error.start + 4]!r} at byte {error.start}",
            expected="valid UTF-8",
            hint=f"{_DOWNLOAD_AGAIN}, or save it as UTF-8",
        ) from error


def _read_small(path: Path) -> bytes:
    """A whole file that is read into memory."""
    descriptor = _open_regular(path)
    with os.fdopen(descriptor, "rb") as stream:
        try:
            content = stream.read(_MAX_SMALL_BYTES + 1)
        except OSError as error:
            raise access_error(path, error) from error
    if len(content) > _MAX_SMALL_BYTES:
        raise CheckpointError(
            "the file is too large",
            file=path,
            found=f"more than {_MAX_SMALL_BYTES} bytes",
            expected=f"at most {_MAX_SMALL_BYTES} bytes",
            hint=_DOWNLOAD_AGAIN,
        )
    return content


def parse_json_object(text: bytes, path: Path) -> dict[str, Any]:
    """One JSON object without repeated keys. Raises CheckpointError that names `path`."""
    try:
        values = sum(map(text.count, (b",", b"[", b"{")))
        if values > _MAX_JSON_VALUES:  # each may take 64 bytes of memory for 2 in the file
            raise ValueError(f"about {values} values, more than {_MAX_JSON_VALUES}")
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_int=_bounded_integer
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            "invalid JSON",
            file=path,
            found=reason,
            expected="one JSON object in UTF-8, every key once",
            hint=_DOWNLOAD_AGAIN,
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            "invalid JSON",
            file=path,
            found=f"a {type(value).__name__}",
            expected="one JSON object",
            hint=_DOWNLOAD_AGAIN,
        )
    return value


def access_error(path: Path, error: OSError | ValueError) -> CheckpointError:
    """What the operating system said about `path`, in the words of the user's next step."""
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return CheckpointError(
            "broken symbolic link",
            file=path,
            found=f"a link to {os.readlink(path)}, which does not exist",
            expected="a readable file",
            hint="download the checkpoint again, or restore the link's target",
        )
    if isinstance(error, FileNotFoundError):
        return CheckpointError(
            "no such file",
            file=path,
            found="nothing",
            expected="a readable file",
            hint="check the path; if a download was interrupted, run it again",
        )
    if isinstance(error, PermissionError):
        return CheckpointError(
            "permission denied",
            file=path,
            found=str(error),
            expected="a file that this user may read",
            hint="grant read permission (chmod u+r, and u+x on its directories)",
        )
    return CheckpointError(
        "the file cannot be read",
        file=path,
        found=str(error),
        expected="a readable file",
        hint="check the path and the disk",
    )


def _open_regular(path: Path) -> int:
    """A descriptor of a regular file (asked first: opening a pipe would block)."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise CheckpointError(
                "not a regular file",
                file=path,
                found="a directory" if stat.S_ISDIR(mode) else "a pipe, socket or device",
                expected="a regular file",
                hint="give the path of the checkpoint file itself",
            )
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise access_error(path, error) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {repeated!r} occurs twice")
    return unique


def _bounded_integer(digits: str) -> int:
    """Python converts decimal digits in quadratic time, so a long number could hang it."""
    if len(digits) > _MAX_INTEGER_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
