"""A file that appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from freetoken.errors import ConfigError, FreeTokenError
from freetoken.writing import remedy

_HEADER_BYTES = 64 << 20  # room for metadata: the largest vocabularies take some 20 MB


class AtomicFile:
    """Write to `partial`, beside `final` under a hidden name; `publish` gives it the final name, if
    no other file has taken it.

        with AtomicFile(path, needed_bytes) as file:
            ...write file.partial...
            file.publish()

    Leaving without `publish` removes it. What killed runs left for the same file is removed on
    entry; the lock that a live run holds on its partial file protects it. Errors of the system on
    the way out become FreeTokenErrors that say what to do.
    """

    def __init__(self, final: Path, needed_bytes: int) -> None:
        self.final = final
        self._prefix = f".{final.name}.partial-"
        self._needed_bytes = needed_bytes

    def __enter__(self) -> AtomicFile:
        try:
            self._clear_leftovers()
            self._check_space()
            self._create()
        except OSError as error:
            raise self._explained(error) from error
        return self

    def _create(self) -> None:
        """Anew while another run clears the file away before it has its lock."""
        while True:
            self._lock, name = tempfile.mkstemp(prefix=self._prefix, dir=self.final.parent)
            self.partial = Path(name)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                return
            os.close(self._lock)

    def publish(self) -> None:
        """Flush to disk, then take the final name. Raises ConfigError if it was taken meanwhile."""
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(self._lock, 0o666 & ~umask)
        os.fsync(self._lock)
        try:
            self._take_name()
        except FileExistsError as error:
            raise ConfigError(
                f"{self.final} was created by another program meanwhile; remove it"
            ) from error
        folder = os.open(self.final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _take_name(self) -> None:
        """By a link, which replaces nothing, also of a program that is as fast."""
        try:
            os.link(self.partial, self.final)
        except FileExistsError:
            raise
        except OSError:  # a file system without links, such as FAT
            if os.path.lexists(self.final):
                raise FileExistsError(self.final) from None
            self.partial.rename(self.final)
        else:
            self.partial.unlink()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.partial.unlink(missing_ok=True)
        os.close(self._lock)
        if isinstance(error, OSError):
            raise self._explained(error) from error

    def _clear_leftovers(self) -> None:
        for stale in self.final.parent.glob(glob_escaped(self._prefix) + "*"):
            try:
                descriptor = os.open(stale, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
            except OSError:
                continue  # gone meanwhile, another user's, or no file: it is in nobody's way
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stale.unlink(missing_ok=True)
            except BlockingIOError:
                continue  # a run that is alive
            finally:
                os.close(descriptor)

    def _check_space(self) -> None:
        free_bytes = shutil.disk_usage(self.final.parent).free
        if free_bytes < self._needed_bytes + _HEADER_BYTES:
            raise OSError(errno.ENOSPC, f"{free_bytes / 1e6:,.0f} MB free")

    def _explained(self, error: OSError) -> FreeTokenError:
        return FreeTokenError(
            f"{self.final} could not be written\n"
            f"  found:    {error.strerror or error}\n"
            f"  expected: a writable folder with "
            f"{(self._needed_bytes + _HEADER_BYTES) / 1e6:,.0f} MB free\n"
            f"  what to do: {remedy(error)}, or write to another disk; nothing half-written is left"
        )


def glob_escaped(text: str) -> str:
    """`text` with nothing that a glob would take for a pattern."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)
