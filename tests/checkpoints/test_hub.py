"""Hub ids: what is asked of the client, and its errors in the user's words. No network."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from freetoken.checkpoints import hub, open_checkpoint
from freetoken.checkpoints.hub import HubReference
from freetoken.errors import CheckpointError
from support.checkpoint_files import sample_gguf, sample_safetensors, write_config

REPOSITORY = {
    "config.json": b"{}",
    "model.safetensors": sample_safetensors(),
    "tokenizer.json": b"{}",
    "tokenizer.model": b"",
    "chat_template.jinja": b"",
    "pytorch_model.bin": b"",
    "consolidated.safetensors": b"",
    "original/model.safetensors": b"",
    "README.md": b"",
    "q8.gguf": sample_gguf(),
    "quants/q4.gguf": sample_gguf(),
}


class FakeHub:
    """snapshot_download of one repository; keeps the calls."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: list[str] = []

    def __call__(
        self, repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        self.calls.append(repo_id)
        for name, content in REPOSITORY.items():
            allowed = any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns)
            if allowed and not any(fnmatch.fnmatch(name, p) for p in ignore_patterns):
                path = self.directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return str(self.directory)

    def files(self) -> list[str]:
        paths = (path for path in self.directory.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.directory)) for path in paths)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return fake


def failing_hub(error: Exception) -> Callable[..., str]:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise error

    return snapshot_download


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("owner/name", HubReference("owner/name", None)),
        ("Qwen/Qwen3-30B-A3B", HubReference("Qwen/Qwen3-30B-A3B", None)),
        ("o/n-GGUF:m-Q8_0.gguf", HubReference("o/n-GGUF", "m-Q8_0.gguf")),
        ("o/n-GGUF/m-Q8_0.gguf", HubReference("o/n-GGUF", "m-Q8_0.gguf")),
        ("o/n/dir/m.gguf", HubReference("o/n", "dir/m.gguf")),
        ("models/m.gguf", None),
        ("models/m.safetensors", None),
        ("name", None),
        ("./owner/name", None),
        ("/owner/name", None),
        ("~/owner/name", None),
        ("../name", None),
        ("o/n/dir", None),
        ("o/n:Q4_0", None),
        ("o/n:../m.gguf", None),
        ("o/n://m.gguf", None),
        ("", None),
        ("o/n\n", None),
        ("ö/n", None),
    ],
)
def test_parse(text: str, reference: HubReference | None) -> None:
    assert hub.parse(text) == reference


def test_downloads_only_what_is_needed(fake_hub: FakeHub) -> None:
    checkpoint = open_checkpoint("owner/name")
    assert fake_hub.calls == ["owner/name"]
    assert checkpoint.kind == "safetensors"
    assert checkpoint.path == fake_hub.directory
    assert fake_hub.files() == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
    ]


@pytest.mark.parametrize("file", ["q8.gguf", "quants/q4.gguf"])
@pytest.mark.parametrize("separator", [":", "/"])
def test_downloads_one_gguf_file(fake_hub: FakeHub, file: str, separator: str) -> None:
    checkpoint = open_checkpoint(f"owner/name{separator}{file}")
    assert checkpoint.kind == "gguf"
    assert checkpoint.path == fake_hub.directory / file
    assert fake_hub.files() == [file]


def test_asks_for_all_parts_of_a_split_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot_download(_: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return "/nonexistent"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="no such file"):
        hub.download(HubReference("o/n", "d[1]/m-00002-of-00002.gguf"))
    assert asked == ["d[[]1]/m-00001-of-00002.gguf", "d[[]1]/m-00002-of-00002.gguf"]


def test_local_path_wins(fake_hub: FakeHub) -> None:
    directory = Path("owner/name")
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(sample_safetensors())
    write_config(directory)
    assert open_checkpoint("owner/name").path == directory
    assert fake_hub.calls == []


def test_a_path_object_is_never_a_hub_id(fake_hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory"):
        open_checkpoint(Path("owner/name"))
    assert fake_hub.calls == []


def test_repository_without_safetensors(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REPOSITORY, "model.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)no safetensors.*owner/name:FILE.gguf"):
        open_checkpoint("owner/name")


def test_repository_without_the_file(fake_hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)no such file.*no x.gguf in owner/name"):
        open_checkpoint("owner/name:x.gguf")


class ConnectError(Exception):
    """As HTTP libraries raise them: no relative of OSError."""


RESPONSE = Mock(headers={})


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RepositoryNotFoundError("404", response=RESPONSE), "no such repository.*hf auth login"),
        (GatedRepoError("403", response=RESPONSE), "licence must be accepted.*owner/name"),
        (LocalEntryNotFoundError("nothing cached"), "cannot be reached.*HF_HUB_OFFLINE"),
        (OfflineModeIsEnabled("offline"), "cannot be reached.*HF_HUB_OFFLINE"),
        (OSError(28, "No space left on device"), "failed.*No space left.*it resumes"),
        (ConnectError("no route"), "failed.*ConnectError: no route.*network"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing_hub(error))
    with pytest.raises(CheckpointError, match=f"(?s)^owner/name: .*{message}"):
        open_checkpoint("owner/name")


def test_interrupt_is_not_an_error_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_checkpoint("owner/name")
