"""The `ft` command, as a user meets it: its output, its errors, its exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from freetoken import SamplingParams
from freetoken.cli import progress, run
from freetoken.cli.app import app
from freetoken.demo import demo_model_path
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model, save_hf, tiny_config

VOCAB = 300  # 256 bytes and some special tokens
Ft = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral as GGUF, with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    config = tiny_config("mixtral", hidden_size=96, intermediate_size=96, vocab_size=VOCAB)
    write_gguf(make_model(config), path, tokenizer=True)
    return path


@pytest.fixture
def ft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ft:
    """Run `ft` in this process, with an empty cache."""
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def in_a_process(
    *arguments: str | Path, output: Any = subprocess.PIPE, **options: Any
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "freetoken.cli", *map(str, arguments)],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        **options,
    )


def test_json_is_one_object_with_everything(ft: Ft, model: Path) -> None:
    run = ft("generate", "--model", model, "--prompt", "Hello", "--max-tokens", 9, "--json",
             "--strategy", "hybrid", "--cache-slots", 2, "--max-fetch", 1, "--ignore-eos",
             "--temperature", 0)  # fmt: skip
    assert run.exit_code == 0, run.stderr
    out = json.loads(run.stdout)
    assert out.keys() == {
        "text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "timing",
        "experts", "config",
    }  # fmt: skip
    assert len(out["token_ids"]) == out["completion_tokens"] == 9
    assert out["finish_reason"] == "length"
    assert out["timing"].keys() == {
        "load_s", "prefill_s", "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s",
    }  # fmt: skip
    assert all(seconds > 0 for seconds in out["timing"].values())
    experts = out["experts"]
    assert experts.keys() == {"steps", "active", "hits", "misses", "fetched", "cpu"}
    # Nine tokens are one from the prefill and eight decode steps of three layers, two experts each.
    assert experts["active"] == 8 * 3 * 2
    assert experts["active"] == experts["hits"] + experts["misses"]
    assert experts["misses"] == experts["fetched"] + experts["cpu"]
    assert experts["cpu"] > 0
    config = out["config"]
    assert (config["strategy"], config["device"], config["slots"]) == ("hybrid", "cpu", 2)
    assert config["format"] == "Q8_0"
    assert config["threads"] >= 1
    assert config["isa"]


def test_every_strategy_prints_the_same_text(ft: Ft, model: Path) -> None:
    texts = set()
    for strategy in ("auto", "fused", "offload", "cpu", "hybrid"):
        run = ft("generate", "--model", model, "--prompt", "Once upon", "--max-tokens", 12,
                 "--temperature", 0, "--strategy", strategy)  # fmt: skip
        assert run.exit_code == 0, run.stderr
        texts.add(run.stdout)
        assert "tokens/s" in run.stderr
    assert len(texts) == 1
    assert texts.pop().endswith("\n")


def test_a_seed_repeats_and_another_does_not(ft: Ft, model: Path) -> None:
    def text(seed: int) -> str:
        return ft("generate", "--model", model, "--prompt", "x", "--max-tokens", 16,
                  "--temperature", 1.5, "--seed", seed).stdout  # fmt: skip

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_chat_without_a_template_is_explained(ft: Ft, tmp_path: Path) -> None:
    config = tiny_config("llama", vocab_size=VOCAB)
    save_hf(make_model(config), tmp_path / "hf", tokenizer=True)
    (tmp_path / "hf" / "chat_template.jinja").unlink(missing_ok=True)
    settings = tmp_path / "hf" / "tokenizer_config.json"
    kept = {k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}
    settings.write_text(json.dumps(kept))
    run = ft("generate", "--model", tmp_path / "hf", "--prompt", "x", "--chat")
    assert run.exit_code == 2
    assert "chat template" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--model", "/nowhere/x.gguf", "--prompt", "x"], 1, "/nowhere/x.gguf"),
        (["--model", "MODEL", "--prompt", "x", "--temperature", "-1"], 2, "temperature"),
        (["--model", "MODEL", "--prompt", "x", "--strategy", "magic"], 2, "magic"),
        (["--model", "MODEL", "--prompt", "x", "--cache-slots", "99", "--strategy", "hybrid"],
         2, "99"),
        (["--model", "MODEL", "--prompt", "x", "--threads", "0"], 2, "threads"),
        (["--model", "MODEL", "--prompt", "x", "--max-fetch", "-1", "--strategy", "hybrid"],
         2, "max"),
        (["--model", "MODEL"], 2, "--prompt"),
        (["--model", "MODEL", "--prompt", ""], 2, "prompt"),
    ],
)  # fmt: skip
def test_mistakes_are_explained_without_a_traceback(
    ft: Ft, model: Path, arguments: list[str], status: int, said: str
) -> None:
    run = ft("generate", *(str(model) if a == "MODEL" else a for a in arguments))
    assert run.exit_code == status, run.output
    assert said in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_help_and_version_import_nothing_heavy() -> None:
    script = """
import sys
from freetoken.cli import main
sys.argv = ["ft", OPTION]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {"torch", "numpy", "transformers", "gguf", "huggingface_hub", "jinja2"} & set(sys.modules)
assert not heavy, heavy
"""
    for option, said in (("--help", "generate"), ("--version", "freetoken ")):
        run = subprocess.run(
            [sys.executable, "-c", script.replace("OPTION", repr(option))],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert run.returncode == 0, run.stderr
        assert said in run.stdout


def test_ctrl_c_stops_with_130_and_no_traceback(model: Path) -> None:
    child = in_a_process("generate", "--model", model, "--prompt", "Hello", "--max-tokens", "400",
                         "--ignore-eos", "--temperature", "1", "--seed", "1")  # fmt: skip
    assert child.stdout is not None
    child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_error_message(model: Path) -> None:
    child = in_a_process("generate", "--model", model, "--prompt", "Hello", "--max-tokens", "400",
                         "--ignore-eos", "--temperature", "1", "--seed", "1")  # fmt: skip
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    child.wait(timeout=60)
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_models_are_listed_and_found(ft: Ft, model: Path, tmp_path: Path) -> None:
    assert ft("models", "list").stdout == ""
    folder = tmp_path / "home" / "models"
    folder.mkdir(parents=True)
    (folder / "mine.gguf").write_bytes(b"GGUF")
    (folder / "gone.gguf").symlink_to(tmp_path / "nowhere")
    assert ft("models", "list").stdout == f"mine\t4\tfreetoken\t{folder / 'mine.gguf'}\n"
    assert ft("models", "path").stdout == f"{tmp_path / 'home'}\n"
    assert ft("models", "path", "mine").stdout == f"{folder / 'mine.gguf'}\n"
    unknown = ft("models", "path", "yours")
    assert unknown.exit_code == 2
    assert "mine" in unknown.stderr


def test_demo_answers_twice_and_reports_both(
    ft: Ft, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "demo_model_path", lambda: model)
    run = ft("demo", "--no-chat", "--max-tokens", 10, "--ignore-eos")
    assert run.exit_code == 0, run.stderr
    half = len(run.stdout) // 2
    assert run.stdout[:half] == run.stdout[half:] != ""
    assert "not trained further" in " ".join(run.stderr.split())
    assert "hybrid, 4 of 5 experts cached" in " ".join(run.stderr.split())
    assert "computed on the CPU" in run.stderr


def test_markup_in_a_prompt_is_text(ft: Ft, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "demo_model_path", lambda: model)
    run = ft("demo", "--no-chat", "--max-tokens", 1, "--prompt", "[/b] [red]Hi", "--ignore-eos")
    assert run.exit_code == 0, run.output
    assert "> [/b] [red]Hi" in run.stderr


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_full_disk_behind_stdout_is_an_error_message(model: Path, form: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        child = in_a_process("generate", "--model", model, "--prompt", "x", "--max-tokens", "2",
                             "--seed", "1", *form, output=full)  # fmt: skip
        _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "No space left" in err
    assert "Traceback" not in err


def test_demo_with_json_is_one_object(ft: Ft, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "demo_model_path", lambda: model)
    run = ft("demo", "--no-chat", "--max-tokens", 3, "--ignore-eos", "--json")
    assert json.loads(run.stdout)["completion_tokens"] == 3


def test_every_name_and_path_that_is_listed_can_be_used(
    ft: Ft, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = tmp_path / "home" / "models"
    own.mkdir(parents=True)
    (own / "mine.gguf").symlink_to(model)
    (own / "parted-00001-of-00002.gguf").write_bytes(b"GGUF")
    (own / "parted-00002-of-00002.gguf").write_bytes(b"GGUF")
    for name in ("full", "quantised", "tokenizer-only"):
        folder = tmp_path / "hub" / f"models--owner--{name}" / "snapshots" / ("0" * 40)
        folder.mkdir(parents=True)
        refs = folder.parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text("0" * 40)
        if name == "full":
            save_hf(make_model(tiny_config("llama", vocab_size=VOCAB)), folder, tokenizer=True)
        elif name == "quantised":
            (folder / "Q8").mkdir()
            (folder / "Q8" / "tiny.gguf").symlink_to(model)
        else:
            (folder / "config.json").write_text("{}")
    listed, _ = in_a_process("models", "list").communicate()  # the hub's folder is read once
    rows = [line.split("\t") for line in listed.splitlines()]
    names = [row[0] for row in rows]
    assert names == ["mine", "owner/full", "owner/quantised:Q8/tiny.gguf", "parted-00001-of-00002"]
    assert rows[3][1] == "8"  # both parts
    for name, path in ((row[0], row[3]) for row in rows[:3]):
        assert in_a_process("models", "path", name).communicate()[0] == f"{path}\n"
        for given in {path, name} - {"owner/full", "owner/quantised:Q8/tiny.gguf"}:
            run = ft("generate", "--model", given, "--prompt", "x", "--max-tokens", 1)
            assert run.exit_code == 0, run.stderr
    child = in_a_process("generate", "--model", "owner/quantised:Q8/tiny.gguf", "--prompt", "x",
                         "--max-tokens", "1")  # fmt: skip
    _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err


def test_a_damaged_demo_model_is_to_be_deleted(
    ft: Ft, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "home" / "models" / demo_model_path().name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(model.read_bytes()[:-1000])
    for command in (["demo"], ["generate", "--model", damaged.stem, "--prompt", "x"]):
        run = ft(*command)
        assert run.exit_code == 1
        assert f"if the demo model is damaged: delete {damaged} and run `ft demo`" in run.stderr
    elsewhere = tmp_path / "other.gguf"
    elsewhere.write_bytes(damaged.read_bytes())
    assert "ft demo" not in ft("generate", "--model", elsewhere, "--prompt", "x").stderr


@pytest.mark.parametrize(
    ("home", "found"),
    [
        ("FILE", "a file"),
        ("FILE/below", "Not a directory"),
        ("some/where", "a relative path"),
        ("~nobody-of-that-name/x", "home directory"),
        ("/" + "x" * 300, "too long"),
    ],
)
def test_a_home_that_cannot_be_is_explained(
    ft: Ft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, found: str
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("FREETOKEN_HOME", home.replace("FILE", str(tmp_path / "file")))
    for command in (["models", "list"], ["models", "path"], ["demo"]):
        run = ft(*command)
        assert run.exit_code == 2, run.output
        assert "FREETOKEN_HOME" in run.stderr and found in run.stderr, run.stderr
        assert "what to do: set" in run.stderr


def test_help_shows_the_defaults_that_apply(ft: Ft) -> None:
    shown = " ".join(ft("generate", "--help").stdout.split())
    defaults = SamplingParams()
    for option in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        text = shown.split(f"--{option.replace('_', '-')} ")[1].split("]")[0]
        assert f"[default: ({getattr(defaults, option)})" in text, text
    demo = " ".join(ft("demo", "--help").stdout.split())
    assert "[default: 160]" in demo and "[default: 0.0]" in demo and "(256)" not in demo


def test_demo_says_whether_the_texts_are_the_same(
    ft: Ft, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "demo_model_path", lambda: model)
    demo = ("demo", "--no-chat", "--max-tokens", 12, "--ignore-eos")
    assert "Both strategies wrote the same text." in ft(*demo).stderr
    sampled = " ".join(ft(*demo, "--temperature", 2).stderr.split())
    assert "The texts differ, because they were sampled without --seed." in sampled
    greedy = SamplingParams(temperature=0)
    assert "rounding" in run._verdict(["a", "b"], greedy, "cuda")
    assert "a bug" in (said := run._verdict(["a", "b"], greedy, "cpu")) and "report" in said


def test_ctrl_c_during_the_imports_shows_no_traceback() -> None:
    script = """
import builtins, sys
real = builtins.__import__
def interrupted(name, *rest, **named):
    if name == "typer":
        raise KeyboardInterrupt
    return real(name, *rest, **named)
from freetoken.cli import main
builtins.__import__ = interrupted
sys.argv = ["ft", "models", "list"]
main()
"""
    child = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.returncode == 130
    assert child.stderr == "\ninterrupted\n"


def test_next_to_nothing_is_imported_before_ctrl_c_is_caught() -> None:
    script = (
        "import sys; before = set(sys.modules); import freetoken.cli;"
        "print(*sorted(set(sys.modules) - before))"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert set(child.stdout.split()) <= {"__future__", "freetoken", "freetoken.cli"}
