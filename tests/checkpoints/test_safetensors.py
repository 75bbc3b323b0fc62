"""safetensors: real files read back exactly and in place; lies in headers and indices refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from freetoken.checkpoints import open_checkpoint
from freetoken.errors import CheckpointError
from support.checkpoint_files import (
    is_mapped,
    raw_safetensors,
    sample_safetensors,
    tensor_info,
    write_config,
)


def make_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"part{seed}.weight": torch.randn(5, 7, generator=generator),
        f"part{seed}.half": torch.randn(3, 4, 2, generator=generator).half(),
        f"part{seed}.brain": torch.randn(9, generator=generator).bfloat16(),
        f"part{seed}.empty": torch.zeros(0, 3),
        f"part{seed}.scalar": torch.tensor(2.5),
    }


FORMAT_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def assert_holds(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(path)
    assert checkpoint.kind == "safetensors"
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        entry = checkpoint.tensor(name)
        assert entry.format.name == FORMAT_NAMES[tensor.dtype]
        assert entry.shape == tuple(tensor.shape)
        assert entry.data.tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        np.testing.assert_array_equal(entry.dequantize(), tensor.float().numpy())
        assert is_mapped(entry.data) and not entry.data.flags.writeable


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards with an index, config.json and generation_config.json."""
    weight_map = {}
    for seed in (0, 1):
        shard = f"model-0000{seed + 1}-of-00002.safetensors"
        save_file(make_tensors(seed), tmp_path / shard)
        weight_map |= dict.fromkeys(make_tensors(seed), shard)
    write_index(tmp_path, weight_map)
    write_config(tmp_path, hidden_size=8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    return tmp_path


def write_index(directory: Path, weight_map: Any) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_single_file(tmp_path: Path) -> None:
    tensors = make_tensors(0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_config(tmp_path, hidden_size=8)
    assert_holds(tmp_path, tensors)
    assert_holds(tmp_path / "model.safetensors", tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path
    assert checkpoint.metadata["hidden_size"] == 8
    assert dict(checkpoint.generation_config) == {}
    assert checkpoint.file_bytes() == (tmp_path / "model.safetensors").stat().st_size


def test_sharded(sharded: Path) -> None:
    tensors = make_tensors(0) | make_tensors(1)
    assert_holds(sharded, tensors)
    assert_holds(sharded / "model.safetensors.index.json", tensors)
    assert_holds(sharded / "model-00002-of-00002.safetensors", tensors)
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.generation_config["eos_token_id"] == [2, 7]
    shards = sharded.glob("*.safetensors")
    assert checkpoint.file_bytes() == sum(path.stat().st_size for path in shards)


def test_views_share_the_map_and_outlive_the_checkpoint(tmp_path: Path) -> None:
    tensors = make_tensors(0)
    save_file(tensors, tmp_path / "model.safetensors")
    write_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    entry = checkpoint.tensor("part0.weight")
    assert np.shares_memory(entry.data, checkpoint.tensor("part0.weight").data)
    checkpoint.close()
    del checkpoint
    np.testing.assert_array_equal(entry.dequantize(), tensors["part0.weight"].numpy())


def test_other_files_do_not_matter(tmp_path: Path) -> None:
    """Mistral's repositories hold the weights twice, macOS adds files that start with a dot."""
    tensors = make_tensors(0)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"rubbish")
    (tmp_path / "._model.safetensors").write_bytes(b"rubbish")
    write_config(tmp_path)
    assert_holds(tmp_path, tensors)


def test_the_only_file_may_have_any_name(tmp_path: Path) -> None:
    tensors = make_tensors(0)
    save_file(tensors, tmp_path / "weights.safetensors")
    write_config(tmp_path)
    assert_holds(tmp_path, tensors)


def test_unsupported_type_is_named_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(sample_safetensors())
    write_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensor("c").dequantize().shape == ()
    with pytest.raises(
        CheckpointError,
        match=r"(?s)model.safetensors, tensor 'ids'.*I64 \(the type of 1 of 5.*F32",
    ):
        checkpoint.tensor("ids")
    with pytest.raises(CheckpointError, match=r"(?s)tensor 'a'.*similar: "):
        checkpoint.tensor("a")


F32_PAIR = {"t": tensor_info("F32", [2], 0, 8)}
DEEP = b'{"t":' + b"[" * 100_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\0" * 7, "not a safetensors file"),
        (b"\0" * 8, "not a safetensors file"),
        (raw_safetensors({}, length=(1 << 64) - 1), "a header of 18446744073709551615 bytes"),
        (raw_safetensors(b"[1]"), "not a safetensors file"),
        (raw_safetensors(F32_PAIR, length=500), "a header of 500 bytes"),
        (raw_safetensors(b'{"t": '), "invalid JSON"),
        (raw_safetensors(b'{"t\xff": 1}'), "invalid JSON"),
        (raw_safetensors(DEEP), "invalid JSON.*nested too deeply"),
        (raw_safetensors(b'{"a": 1, "a": 2}'), "the key 'a' occurs twice"),
        (raw_safetensors(b'{"t": ' + b"1" * 5000 + b"}"), "a number of 5000 digits"),
        (raw_safetensors(b'{"t": [' + b"[]," * (3 << 20) + b"0]}"), "about 6291458 values"),
        (raw_safetensors({"t": 1}), "'t': invalid description"),
        (raw_safetensors({"t": {"dtype": "F32"}}), "'t': invalid description"),
        (raw_safetensors({"t": tensor_info("F33", [2], 0, 8)}), "'t': unknown type.*F33.*BF16"),
        *(
            (raw_safetensors({"t": tensor_info("F32", shape, 0, 8)}), "'t': invalid shape")
            for shape in ([-2], [2.0], [True, 2], ["2"], [1 << 63], [1] * 17, [None])
        ),
        *(
            (raw_safetensors({"t": tensor_info("F32", [2], *ends)}), "'t': invalid data_offsets")
            for ends in ((8, 0), (-8, 0), (0, 8.0), (None, 8))
        ),
        (
            raw_safetensors({"t": tensor_info("F32", [3], 0, 8)}, b"\0" * 8),
            r"'t': shape and data_offsets disagree.*8 bytes.*12 bytes for F32 of shape \[3\]",
        ),
        (raw_safetensors({"t": tensor_info("F4", [3], 0, 1)}, b"\0"), "'t': shape and data"),
        (
            raw_safetensors({"t": tensor_info("F32", [(1 << 63) - 1] * 16, 0, 8)}, b"\0" * 8),
            "'t': shape and data_offsets disagree",
        ),
        (raw_safetensors(F32_PAIR, b"\0" * 7), "'t': the tensor's data ends beyond.*truncated"),
        (raw_safetensors(F32_PAIR, b"\0" * 9), "belong to no tensor.*9 bytes.*8, the sum"),
        (
            raw_safetensors({"t": tensor_info("F32", [2], 4, 12)}, b"\0" * 12),
            "bytes of the file belong to no tensor",
        ),
        (
            raw_safetensors(F32_PAIR | {"u": tensor_info("F32", [2], 4, 12)}, b"\0" * 12),
            "'u': the tensor's data overlaps that of 't'",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS pointer.*lfs pull"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else f"{len(value)}-bytes",
)
def test_refuses(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    write_config(tmp_path)
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        open_checkpoint(tmp_path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert len(text) < 2000
    for part in ("found:", "expected:", "what to do:"):
        assert part in text


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = sample_safetensors()
    write_config(tmp_path)
    for length in range(len(content)):
        path = tmp_path / f"{length}.safetensors"
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_missing_config(tmp_path: Path) -> None:
    save_file(make_tensors(0), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)config\.json.*whole repository"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}'])
def test_invalid_config(tmp_path: Path, text: str) -> None:
    save_file(make_tensors(0), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: invalid JSON"):
        open_checkpoint(tmp_path)


def test_config_may_hold_infinity(tmp_path: Path) -> None:
    save_file(make_tensors(0), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"limit": [0.0, Infinity]}')
    assert open_checkpoint(tmp_path).metadata["limit"] == [0.0, float("inf")]


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)model-00002.*no such file.*run it again"):
        open_checkpoint(sharded)


def test_shard_without_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)several safetensors files without an index"):
        open_checkpoint(sharded)


def test_index_names_a_tensor_that_is_missing(sharded: Path) -> None:
    shard = "model-00001-of-00002.safetensors"
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(sharded, index | {"lost": shard})
    with pytest.raises(CheckpointError, match=r"(?s)model-00001.*'lost'.*index is missing"):
        open_checkpoint(sharded)


def test_index_lacks_a_tensor(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    del index["part1.weight"]
    write_index(sharded, index)
    with pytest.raises(CheckpointError, match=r"(?s)model-00002.*'part1.weight'.*not in the index"):
        open_checkpoint(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    save_file(make_tensors(1) | {"part0.weight": torch.zeros(1)}, shard)
    with pytest.raises(CheckpointError, match=r"(?s)model-00002.*'part0.weight'.*not in the index"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "a\0.safetensors",
        3,
        None,
    ],
)
def test_index_with_an_invalid_file_name(sharded: Path, name: object) -> None:
    write_index(sharded, {"t": name})
    with pytest.raises(CheckpointError, match=r"(?s)index.json, tensor 't'.*invalid file.*plain"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}, 3])
def test_index_without_weight_map(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match="no weight_map"):
        open_checkpoint(sharded)
