"""What a user may name, and what is said when it is no checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from freetoken.checkpoints import mapping, open_checkpoint
from freetoken.errors import CheckpointError
from support.checkpoint_files import raw_gguf, sample_gguf, sample_safetensors, write_config


def refuses(path: Path | str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        open_checkpoint(path)
    for part in ("found:", "expected:", "what to do:"):
        assert part in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    refuses(tmp_path / "absent", "absent: no such file or directory")
    refuses(str(tmp_path / "absent.gguf"), "absent.gguf: no such file or directory")
    refuses("", "no such file or directory")
    (tmp_path / "file").write_bytes(b"x")
    refuses(tmp_path / "file" / "below", "no such file or directory")


@pytest.mark.parametrize("path", ["a\0b", "a" * 5000])
def test_impossible_path(path: str) -> None:
    refuses(path, "cannot be read")


def test_directory_with_one_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(sample_gguf())
    (tmp_path / "README.md").write_text("")
    assert open_checkpoint(tmp_path).path == tmp_path / "m.gguf"
    assert open_checkpoint(str(tmp_path)).kind == "gguf"


def test_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(sample_gguf())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_checkpoint("~/m.gguf").path == tmp_path / "m.gguf"


def test_gguf_by_content(tmp_path: Path) -> None:
    """Caches name their files by hash."""
    (tmp_path / "sha256-0123").write_bytes(sample_gguf())
    assert open_checkpoint(tmp_path / "sha256-0123").kind == "gguf"


def test_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(sample_gguf())
    (tmp_path / "m.gguf").symlink_to("blob")
    assert open_checkpoint(tmp_path / "m.gguf").path == tmp_path / "m.gguf"
    (tmp_path / "blob").unlink()
    refuses(tmp_path / "m.gguf", "broken symbolic link.*a link to blob")


def test_broken_links_in_a_directory(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("../blobs/123")
    refuses(tmp_path, r"model.safetensors: broken symbolic link.*\.\./blobs/123")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(sample_safetensors())
    for name in ("generation_config.json", "config.json"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to("gone")
        refuses(tmp_path, f"{name}: broken symbolic link")


def test_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to("m.gguf")
    refuses(tmp_path / "m.gguf", "m.gguf: the file cannot be read")


def test_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(sample_gguf())
    (tmp_path / "model.safetensors").write_bytes(sample_safetensors())
    write_config(tmp_path)
    refuses(tmp_path, "both GGUF and safetensors.*model.safetensors, m.gguf.*m.gguf")
    assert open_checkpoint(tmp_path / "m.gguf").kind == "gguf"
    assert open_checkpoint(tmp_path / "model.safetensors").kind == "safetensors"


def test_several_ggufs(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(sample_gguf())
    refuses(tmp_path, "several GGUF models.*a.gguf, b.gguf.*one file, such as")


def test_neither_kind(tmp_path: Path) -> None:
    refuses(tmp_path, "no checkpoint in the directory.*an empty directory")
    for index in range(9):
        (tmp_path / f"{index}.txt").write_text("")
    refuses(tmp_path, r"no checkpoint in the directory.*0.txt, .*\(9 files\)")


def test_pickled_checkpoint(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4")
    refuses(tmp_path, "no checkpoint in the directory.*convert it to safetensors")
    refuses(tmp_path / "pytorch_model.bin", "not a checkpoint.*convert it to safetensors")


def test_other_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    refuses(tmp_path / "notes.txt", "not a checkpoint.*starts with b'hello'.*give a .gguf")


@pytest.mark.parametrize("name", ["m.gguf", "m.safetensors", "m"])
def test_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    refuses(tmp_path / name, "empty|starts with b''")


@pytest.mark.parametrize("name", ["m.gguf", "m.safetensors", "m"])
def test_pipe_does_not_block(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    refuses(tmp_path / name, "not a regular file.*a pipe")


def test_directory_in_place_of_a_file(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    refuses(tmp_path, "model.safetensors: not a regular file.*a directory")


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a substitute for the system call: a test run as root may read everything."""
    path = tmp_path / "m.gguf"
    path.write_bytes(sample_gguf())

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(mapping.os, "open", refuse)
        refuses(path, "m.gguf: permission denied.*chmod")
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        refuses(tmp_path, "permission denied.*chmod")
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", refuse)
        refuses(path, "permission denied.*chmod")


def test_file_system_without_mmap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf())

    def refuse(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(mapping.mmap, "mmap", refuse)
    refuses(path, "cannot be mapped into memory.*No such device.*local disk")
