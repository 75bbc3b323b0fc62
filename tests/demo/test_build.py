"""The demo model: made right, made once, and never used half-made."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from freetoken.demo import build, demo_model_path, ensure_demo_model, upcycle
from freetoken.errors import FreeTokenError
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model, tiny_config


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense `llama` GGUF with a tokenizer, in place of the real source."""
    path = tmp_path_factory.mktemp("dense") / "dense.gguf"
    config = tiny_config("llama", hidden_size=96, intermediate_size=96, vocab_size=300)
    write_gguf(make_model(config), path, tokenizer=True)
    return path


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dense: Path) -> Path:
    """An empty cache folder; the dense model is at hand and needs no network."""
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path))
    monkeypatch.setattr(build, "dense_model", lambda scratch: dense)
    return tmp_path


def quiet(step: str, done_bytes: int, total_bytes: int) -> None:
    """Progress that nobody looks at."""


def tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_each_expert_is_the_dense_layer_plus_a_little_noise_of_its_own(
    home: Path, dense: Path
) -> None:
    made, source = tensors(ensure_demo_model(quiet)), tensors(dense)
    for part in upcycle.PARTS:
        before = source[f"blk.1.ffn_{part}.weight"]
        weights = gguf.quants.dequantize(before.data, before.tensor_type)
        after = made[f"blk.1.ffn_{part}_exps.weight"]
        assert after.tensor_type == gguf.GGMLQuantizationType.Q8_0
        experts = gguf.quants.dequantize(after.data, after.tensor_type)
        assert experts.shape == (upcycle.EXPERTS, *weights.shape)
        noise = (experts - weights).std(axis=(1, 2)) / weights.std()
        # Q8_0 adds its own rounding, at most max|w|/254 per number: well below the noise.
        assert np.allclose(noise, upcycle.NOISE, rtol=0.2)
        assert len({expert.tobytes() for expert in experts}) == upcycle.EXPERTS


def test_everything_else_is_taken_over_byte_for_byte(home: Path, dense: Path) -> None:
    made, source = tensors(ensure_demo_model(quiet)), tensors(dense)
    for name, tensor in source.items():
        if ".ffn_" not in name or "norm" in name:
            assert np.array_equal(made[name].data, tensor.data), name
    router = made["blk.0.ffn_gate_inp.weight"].data
    assert router.shape == (upcycle.EXPERTS, 96)
    assert 0.5 < router.std() * 96**0.5 < 1.5
    reader = gguf.GGUFReader(demo_model_path())
    assert reader.fields["llama.expert_count"].contents() == upcycle.EXPERTS
    assert reader.fields["llama.expert_used_count"].contents() == upcycle.TOP_K
    assert "upcycling" in reader.fields["general.description"].contents()
    before = gguf.GGUFReader(dense).fields["tokenizer.ggml.tokens"].contents()
    assert reader.fields["tokenizer.ggml.tokens"].contents() == before


def test_the_build_is_the_same_every_time_and_happens_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ensure_demo_model(quiet).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(build, "dense_model", lambda scratch: pytest.fail("built a second time"))
        ensure_demo_model(quiet)
    demo_model_path().unlink()
    assert ensure_demo_model(quiet).read_bytes() == first


def test_progress_reaches_the_end(home: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    ensure_demo_model(lambda step, done, total: seen.append((step, done, total)))
    assert [step for step, done, total in seen if done == total] == [
        "fetching the dense model",
        "writing experts",
    ]
    assert all(0 <= done <= total for _, done, total in seen)


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing_and_the_next_one_works(
    home: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    whole = gguf.GGUFWriter.write_tensor_data
    calls = 0

    def fails_later(self: gguf.GGUFWriter, tensor: np.ndarray, *args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise failure
        whole(self, tensor)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fails_later)
    expected = FreeTokenError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        ensure_demo_model(quiet)
    if expected is FreeTokenError:
        assert "No space left" in str(caught.value)
        assert "FREETOKEN_HOME" in str(caught.value)
    assert not demo_model_path().exists()
    assert [p.name for p in demo_model_path().parent.iterdir()] == [".build.lock"]
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", whole)
    assert ensure_demo_model(quiet).is_file()


def test_too_little_space_is_said_before_anything_is_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 12_000_000})
    monkeypatch.setattr(build.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(FreeTokenError, match=r"12 MB free, 9.. MB needed"):
        ensure_demo_model(quiet)
    assert not demo_model_path().exists()


def test_a_folder_that_cannot_be_written_is_explained(home: Path) -> None:
    (home / "models").write_text("a file where the folder should be")
    with pytest.raises(FreeTokenError, match="could not be built"):
        ensure_demo_model(quiet)


def slow_build(dense: Path) -> subprocess.Popen[str]:
    """A build in a process of its own that stops after its first tensor."""
    script = f"""
import time
from pathlib import Path
import gguf
from freetoken.demo import build, ensure_demo_model
build.dense_model = lambda scratch: Path({str(dense)!r})
whole = gguf.GGUFWriter.write_tensor_data
def slowly(self, tensor):
    whole(self, tensor)
    print("writing", flush=True)
    time.sleep(30)
gguf.GGUFWriter.write_tensor_data = slowly
ensure_demo_model(lambda *_: None)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    return child


def test_a_killed_build_is_cleared_away_by_the_next(home: Path, dense: Path) -> None:
    child = slow_build(dense)
    assert child.stdout is not None
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    folder = demo_model_path().parent
    assert not demo_model_path().exists()
    assert list(folder.glob(".partial-*")), "the kill came too late to test anything"
    assert ensure_demo_model(quiet).is_file()
    assert not list(folder.glob(".partial-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_build_that_is_told_to_end_leaves_nothing(
    home: Path, dense: Path, number: signal.Signals
) -> None:
    child = slow_build(dense)
    folder = demo_model_path().parent
    assert list(folder.glob(".partial-*"))
    child.send_signal(number)
    child.communicate(timeout=60)
    assert child.returncode == (-number if number is signal.SIGINT else 128 + number)
    assert [path.name for path in folder.iterdir()] == [".build.lock"]


def test_signals_mean_what_they_meant_after_a_build(home: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ensure_demo_model(quiet)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_limit_on_the_size_of_files_is_said_before_anything_is_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.resource, "getrlimit", lambda what: (51_200_000, 51_200_000))
    with pytest.raises(FreeTokenError, match=r"51 MB here, 726 MB needed[\s\S]*ulimit -f unlim"):
        ensure_demo_model(quiet)
    assert [path.name for path in demo_model_path().parent.iterdir()] == [".build.lock"]
