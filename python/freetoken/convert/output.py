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

_HEADER_BYTES = 64 << 20  # room for metadata: the largest vocabularies take some 20 MB


class AtomicFile:
    """Write to `partial`, beside `final` under a hidden name; `publish` renames it.

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
            self._lock, name = tempfile.mkstemp(prefix=self._prefix, dir=self.final.parent)
        except OSError as error:
            raise self._explained(error) from error
        self.partial = Path(name)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def publish(self) -> None:
        """Flush to disk, then take the final name. Raises ConfigError if it was taken meanwhile."""
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(self._lock, 0o666 & ~umask)
        os.fsync(self._lock)
        if self.final.exists():
            raise ConfigError(f"{self.final} was created by another program meanwhile; remove it")
        self.partial.rename(self.final)
        folder = os.open(self.final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

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
            descriptor = os.open(stale, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stale.unlink()
            except BlockingIOError:
                continue  # a run that is alive
            finally:
                os.close(descriptor)

    def _check_space(self) -> None:
        free_bytes = shutil.disk_usage(self.final.parent).free
        if free_bytes < self._needed_bytes + _HEADER_BYTES:
            raise OSError(errno.ENOSPC, f"{free_bytes / 1e6:,.0f} MB free")

    def _explained(self, error: OSError) -> FreeTokenError:
        remedy = "free some space" if error.errno == errno.ENOSPC else "make the folder writable"
        return FreeTokenError(
            f"{self.final} could not be written\n"
            f"  found:    {error.strerror or error}\n"
            f"  expected: a writable folder with "
            f"{(self._needed_bytes + _HEADER_BYTES) / 1e6:,.0f} MB free\n"
            f"  what to do: {remedy}, or write to another disk; nothing half-written is left"
        )


def glob_escaped(text: str) -> str:
    """`text` with nothing that a glob would take for a pattern."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)
