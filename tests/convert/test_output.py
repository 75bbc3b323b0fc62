"""Files that appear whole or not at all, whatever ends the run that writes them."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freetoken.convert import output as output_module
from freetoken.convert.output import AtomicFile
from freetoken.errors import ConfigError, FreeTokenError

# The command, with a pause at the first tensor.
SLOW = """
import sys, time
from freetoken.cli import convert as command, main
def slow(model, out, *, experts, dense, progress):
    from freetoken.convert.output import AtomicFile
    with AtomicFile(out, 10):
        print("writing", flush=True)
        time.sleep(60)
command.convert = slow
sys.argv = ["ft", "convert", "--model", "m", "--out", sys.argv[1], "--experts", "F16"]
main()
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_run_that_is_asked_to_end_leaves_nothing(
    number: int, status: int, tmp_path: Path
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW, tmp_path / "m.gguf"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    assert [path.name[:16] for path in tmp_path.iterdir()] == [".m.gguf.partial-"]
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == status, err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_ignored_or_handled_stays_so(tmp_path: Path) -> None:
    script = """
import os, signal
from freetoken.writing import tidy_ends
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with tidy_ends():
    os.kill(os.getpid(), signal.SIGHUP)
seen = []
signal.signal(signal.SIGHUP, lambda number, frame: seen.append(number))
with tidy_ends():
    os.kill(os.getpid(), signal.SIGHUP)
assert seen == [signal.SIGHUP]
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == 0


def test_a_name_that_is_taken_at_the_last_moment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "m.gguf"

    def late(_source: Path, target: Path) -> None:
        monkeypatch.undo()
        target.write_bytes(b"precious")
        os.link(_source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(ConfigError, match="by another program"), AtomicFile(final, 10) as file:
        file.publish()
    assert final.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [final]


def _no_links(*_arguments: Any) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", _no_links)
    final = tmp_path / "m.gguf"
    with AtomicFile(final, 10) as file:
        file.partial.write_bytes(b"whole")
        file.publish()
    assert final.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [final]
    with pytest.raises(ConfigError, match="was created"), AtomicFile(final, 10) as file:
        file.publish()
    assert final.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [final]


def test_leftovers_that_cannot_be_cleared_are_in_nobodys_way(tmp_path: Path) -> None:
    folder = tmp_path / ".m.gguf.partial-folder"
    folder.mkdir()
    link = tmp_path / ".m.gguf.partial-link"
    link.symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_bytes(b"precious")
    os.mkfifo(tmp_path / ".m.gguf.partial-pipe")
    with AtomicFile(tmp_path / "m.gguf", 10) as file:
        file.publish()
    assert (tmp_path / "m.gguf").is_file() and folder.is_dir() and link.is_symlink()
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_a_partial_file_that_another_run_clears_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    cleared: list[Path] = []

    def beaten(descriptor: int, operation: int) -> None:
        if not cleared:
            cleared.extend(tmp_path.iterdir())
            cleared[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(output_module.fcntl, "flock", beaten)
    with AtomicFile(tmp_path / "m.gguf", 10) as file:
        assert file.partial.is_file() and file.partial != cleared[0]
        file.publish()
    assert (tmp_path / "m.gguf").is_file()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EFBIG, r"ulimit -f"),
        (errno.ENAMETOOLONG, "a shorter name"),
        (errno.EROFS, "mount the file system writable"),
        (errno.EACCES, "make the folder writable"),
        (errno.EIO, "look after the disk"),
    ],
)
def test_errors_name_the_way_out(number: int, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(FreeTokenError, match=remedy), AtomicFile(tmp_path / "m", 10):
        raise OSError(number, os.strerror(number))
    assert list(tmp_path.iterdir()) == []


def test_names_as_long_as_the_system_allows_are_explained(tmp_path: Path) -> None:
    with (
        pytest.raises(FreeTokenError, match="a shorter name"),
        AtomicFile(tmp_path / ("n" * 250), 1),
    ):
        pass
