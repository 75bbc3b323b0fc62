"""What everything that writes large files shares: an end that leaves nothing behind, and the way
out of what the system may refuse."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ASKS_TO_END = (signal.SIGTERM, signal.SIGHUP)
_REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space of your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f unlimited)",
    errno.ENAMETOOLONG: "choose a shorter name (it gets some letters more while it is written)",
    errno.EACCES: "make the folder writable",
    errno.EPERM: "make the folder writable",
    errno.EROFS: "mount the file system writable",
}


@contextmanager
def tidy_ends() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the block and end the process with status 128 + signal, as a shell
    would report it, instead of ending it where it stands. One that is ignored (`nohup`), or that
    the caller handles, stays so; and both do outside the main thread, which alone may set handlers.
    """
    changed = []
    if threading.current_thread() is threading.main_thread():
        changed = [n for n in _ASKS_TO_END if signal.getsignal(n) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def remedy(error: OSError) -> str:
    """What to do about an error on the way to a file."""
    return _REMEDIES.get(error.errno or 0, "look after the disk")
