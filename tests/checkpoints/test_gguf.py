"""GGUF: real files read back exactly and in place; every lie in a header refused by name."""

from __future__ import annotations

import shutil
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from freetoken.checkpoints import open_checkpoint
from freetoken.checkpoints.ggml_types import GGML_TYPES
from freetoken.checkpoints.gguf import part_names
from freetoken.checkpoints.tables import FileCheckpoint
from freetoken.errors import CheckpointError
from support.checkpoint_files import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    STRING,
    UINT32,
    RawTensor,
    gguf_array,
    gguf_pair,
    gguf_string,
    is_mapped,
    raw_gguf,
    sample_gguf,
)

TYPES = gguf.GGMLQuantizationType


def make_tensors() -> dict[str, tuple[np.ndarray, TYPES]]:
    generator = np.random.default_rng(3)
    floats = generator.standard_normal((4, 8, 64)).astype(np.float32)
    tensors: dict[str, tuple[np.ndarray, TYPES]] = {
        "norm": (floats[0, 0], TYPES.F32),
        "half": (floats[0].astype(np.float16), TYPES.F16),
    }
    for qtype in (TYPES.BF16, TYPES.Q8_0, TYPES.Q4_0, TYPES.Q4_1):
        tensors[f"experts.{qtype.name}"] = (gguf.quants.quantize(floats, qtype), qtype)
    return tensors


def write_real_gguf(path: Path, **options: int) -> dict[str, tuple[np.ndarray, TYPES]]:
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.eps", 1e-5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_token_list(["<s>", "é", "", "日本"])
    writer.add_token_scores([0.0, -1.5, 2.0, 3.0])
    writer.add_token_types([3, 1, 1, 1])
    tensors = make_tensors()
    for name, (data, qtype) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def assert_holds(checkpoint: FileCheckpoint, tensors: dict[str, tuple[np.ndarray, TYPES]]) -> None:
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, (data, qtype) in tensors.items():
        entry = checkpoint.tensor(name)
        assert name in checkpoint
        assert entry.format.name == qtype.name
        assert entry.data.tobytes() == data.tobytes()
        expected = gguf.quants.dequantize(data, qtype)
        assert entry.shape == expected.shape
        np.testing.assert_array_equal(entry.dequantize(), expected)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_types_agree_with_the_gguf_package() -> None:
    """Every type that the package knows; ours may be ahead of an older package."""
    for qtype, sizes in GGML_QUANT_SIZES.items():
        ours = GGML_TYPES[int(qtype)]
        assert (ours.name, ours.block_elements, ours.block_bytes) == (qtype.name, *sizes)


def test_reads_a_real_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensors = write_real_gguf(path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.kind == "gguf"
    assert checkpoint.path == path
    assert checkpoint.file_bytes() == path.stat().st_size
    assert dict(checkpoint.generation_config) == {}
    assert_holds(checkpoint, tensors)
    metadata = checkpoint.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["llama.eps"] == np.float32(1e-5)
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.tokens"] == ["<s>", "é", "", "日本"]
    np.testing.assert_array_equal(metadata["tokenizer.ggml.scores"], np.float32([0, -1.5, 2, 3]))
    np.testing.assert_array_equal(metadata["tokenizer.ggml.token_type"], [3, 1, 1, 1])


def test_views_are_in_place_and_outlive_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensors = write_real_gguf(path)
    checkpoint = open_checkpoint(path)
    entry = checkpoint.tensor("experts.Q8_0")
    assert np.shares_memory(entry.data, checkpoint.tensor("experts.Q8_0").data)
    assert not np.shares_memory(entry.data, checkpoint.tensor("experts.Q4_0").data)
    assert is_mapped(entry.data)
    assert not entry.data.flags.writeable and not entry.data.flags.owndata
    assert entry.data.flags.c_contiguous and entry.data.ndim == 1
    checkpoint.close()
    del checkpoint
    assert entry.data.tobytes() == tensors["experts.Q8_0"][0].tobytes()


def test_closed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", sample_gguf()))
    checkpoint.close()
    for access in (checkpoint.names, lambda: checkpoint.tensor("norm")):
        with pytest.raises(CheckpointError, match="is closed"):
            access()


@pytest.mark.parametrize("version", [2, 3])
def test_sample(tmp_path: Path, version: int) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", sample_gguf(version)))
    assert checkpoint.tensor("q4").shape == (2, 1, 32)
    assert checkpoint.metadata["a.words"] == ["a", "é", " "]
    assert checkpoint.metadata["a.flags"].tolist() == [True, False, True]
    with pytest.raises(TypeError):
        checkpoint.metadata["a.u8"] = 1  # type: ignore[index]


def test_alignment_is_read(tmp_path: Path) -> None:
    pairs = [ARCHITECTURE, gguf_pair("general.alignment", UINT32, struct.pack("<I", 128))]
    content = raw_gguf(
        pairs, [RawTensor("t", (2,), 0, 128)], b"\0" * 128 + b"\1\0\0\0" * 2, alignment=128
    )
    entry = open_checkpoint(write(tmp_path / "m.gguf", content)).tensor("t")
    assert entry.data.tobytes() == b"\1\0\0\0" * 2


def test_missing_tensor_names_similar_ones(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", sample_gguf()))
    with pytest.raises(CheckpointError, match=r"(?s)m\.gguf, tensor 'norms'.*similar: norm"):
        checkpoint.tensor("norms")


def test_unsupported_type_is_named_when_asked_for(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", sample_gguf()))
    assert "kq" in checkpoint
    with pytest.raises(
        CheckpointError, match=r"(?s)m\.gguf, tensor 'kq'.*Q2_K \(the type of 1 of 4.*F32, F16"
    ):
        checkpoint.tensor("kq")


TENSOR = RawTensor("t", (32,), 8, 0)
BLOCK = b"\0" * 34
HUGE = (1 << 64) - 1


def pair(key: str, value_type: int, value: bytes) -> list[bytes]:
    return [ARCHITECTURE, gguf_pair(key, value_type, value)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF file"),
        (b"ggml" + b"\0" * 60, r"not a GGUF file.*found: +first bytes b'ggml'"),
        (raw_gguf(version=1), "unsupported GGUF version.*found: +1.*2 or 3"),
        (raw_gguf(version=4), "unsupported GGUF version"),
        (raw_gguf(version=3 << 24), "big-endian.*gguf-convert-endian"),
        (b"GGUF\3\0\0\0", "header ends within the number of tensors"),
        (raw_gguf(tensor_count=HUGE), f"number of tensors is impossible.*{HUGE}"),
        (raw_gguf(pair_count=HUGE), "number of metadata pairs is impossible"),
        (raw_gguf(pair_count=2), "metadata pair 1 has an invalid length.*0 bytes"),
        (raw_gguf([ARCHITECTURE] * 2), "'general.architecture' occurs twice"),
        (raw_gguf(pair("k", 13, b"")), "'k' has an unknown type"),
        (raw_gguf(pair("k", BOOL, b"\2")), "'k' is no bool"),
        (raw_gguf(pair("k" * 2000, BOOL, b"\1")), "invalid length.*2000 bytes.*1 to 1024"),
        (raw_gguf(pair("k", STRING, struct.pack("<Q", HUGE))), "header ends within metadata 'k'"),
        (raw_gguf(pair("k", STRING, gguf_string(b"\xff"))), "'k' is no valid text.*UTF-8"),
        (
            raw_gguf(pair("k", ARRAY, gguf_array(STRING, HUGE, b""))),
            "number of items of metadata 'k' is impossible",
        ),
        (
            raw_gguf(pair("k", ARRAY, gguf_array(STRING, 2, gguf_string("x" * 50) + b"\xff" * 8))),
            "header ends within metadata 'k'.*item 1 of 2",
        ),
        (
            raw_gguf(pair("k", ARRAY, gguf_array(STRING, 1, gguf_string(b"\xff")))),
            "'k' is no valid text",
        ),
        (
            raw_gguf(pair("k", ARRAY, gguf_array(UINT32, HUGE, b""))),
            "number of items of metadata 'k' is impossible",
        ),
        (raw_gguf(pair("k", ARRAY, gguf_array(ARRAY, 1, b"\0" * 64))), "array of arrays"),
        (raw_gguf(pair("k", ARRAY, gguf_array(77, 1, b"\0" * 64))), "item type 77"),
        *(
            (
                raw_gguf(pair("general.alignment", UINT32, struct.pack("<I", value))),
                f"'general.alignment' is invalid.*{value}.*power of two",
            )
            for value in (0, 48, 1 << 31)
        ),
        (raw_gguf(pair("general.alignment", STRING, gguf_string("32"))), "alignment' is invalid"),
        (
            raw_gguf(tensors=[RawTensor("t", (1, 1, 1, 1, 1), 0, 0)], data=BLOCK),
            "too many dimensions.*found: +5.*at most 4",
        ),
        (raw_gguf(tensors=[RawTensor("t", (32, 0), 8, 0)], data=BLOCK), "empty dimension"),
        (
            raw_gguf(tensors=[RawTensor("t", (32,), 99, 0)], data=BLOCK),
            "'t': unknown tensor type.*type number 99.*one of F32",
        ),
        (
            raw_gguf(tensors=[RawTensor("t", (33,), 8, 0)], data=BLOCK * 2),
            "'t': a row is no whole number of Q8_0 blocks.*33.*multiple of 32",
        ),
        (
            raw_gguf(tensors=[RawTensor("t", (32,), 8, 8)], data=BLOCK * 2),
            "'t': the tensor's data is misaligned.*offset 8.*32",
        ),
        (raw_gguf(tensors=[TENSOR], data=BLOCK[:-1]), "'t'.*beyond the end.*truncated"),
        (
            raw_gguf(tensors=[RawTensor("t", (1 << 63,) * 4, 0, 0)], data=BLOCK),
            "'t'.*beyond the end of the file",
        ),
        (
            raw_gguf(tensors=[RawTensor("t", (32,), 8, HUGE - 31)], data=BLOCK),
            "'t'.*beyond the end of the file",
        ),
        (
            raw_gguf(tensors=[TENSOR, RawTensor("u", (32,), 8, 32)], data=BLOCK * 2),
            "'u': the tensor's data overlaps that of 't'",
        ),
        (
            raw_gguf(tensors=[TENSOR, RawTensor("t", (32,), 8, 64)], data=b"\0" * 98),
            "'t': the tensor occurs twice",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else f"{len(value)}-bytes",
)
def test_refuses(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path / "bad.gguf", content)
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        open_checkpoint(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    for part in ("found:", "expected:", "what to do:"):
        assert part in text


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = sample_gguf()
    for length in range(len(content)):
        path = write(tmp_path / f"{length}.gguf", content[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


@pytest.fixture
def split_model(tmp_path: Path) -> tuple[Path, dict[str, tuple[np.ndarray, TYPES]]]:
    directory = tmp_path / "split"
    directory.mkdir()
    tensors = write_real_gguf(directory / "m.gguf", split_max_tensors=2)
    assert sorted(path.name for path in directory.iterdir()) == part_names("m-00001-of-00003.gguf")
    return directory, tensors


def test_split_model_opens_from_any_part(
    split_model: tuple[Path, dict[str, tuple[np.ndarray, TYPES]]],
) -> None:
    directory, tensors = split_model
    for path in (*sorted(directory.iterdir()), directory):
        checkpoint = open_checkpoint(path)
        assert_holds(checkpoint, tensors)
        assert checkpoint.metadata["llama.block_count"] == 2
        assert checkpoint.file_bytes() == sum(f.stat().st_size for f in directory.iterdir())


def test_split_model_with_a_missing_part(
    split_model: tuple[Path, dict[str, tuple[np.ndarray, TYPES]]],
) -> None:
    directory, _ = split_model
    (directory / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)2 of 3 parts; missing: m-00002-of-00003.gguf"):
        open_checkpoint(directory / "m-00003-of-00003.gguf")


def test_split_model_with_a_foreign_part(
    split_model: tuple[Path, dict[str, tuple[np.ndarray, TYPES]]],
) -> None:
    directory, _ = split_model
    shutil.copy(directory / "m-00003-of-00003.gguf", directory / "m-00002-of-00003.gguf")
    with pytest.raises(
        CheckpointError, match=r"(?s)m-00002.*does not belong.*'split.no': 2.*'split.no': 1"
    ):
        open_checkpoint(directory / "m-00001-of-00003.gguf")


def test_split_model_with_lost_tensors(tmp_path: Path) -> None:
    for number in (0, 1):
        pairs = [
            gguf_pair("split.no", UINT32, struct.pack("<I", number)),
            gguf_pair("split.count", UINT32, struct.pack("<I", 2)),
            gguf_pair("split.tensors.count", UINT32, struct.pack("<I", 5)),
        ]
        content = raw_gguf(pairs, [RawTensor(f"t{number}", (32,), 8, 0)], BLOCK)
        write(tmp_path / f"m-{number + 1:05d}-of-00002.gguf", content)
    with pytest.raises(CheckpointError, match=r"(?s)lost tensors.*2 tensors in 2 parts.*5"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_renamed_part(split_model: tuple[Path, dict[str, tuple[np.ndarray, TYPES]]]) -> None:
    directory, _ = split_model
    shutil.move(directory / "m-00001-of-00003.gguf", directory / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"(?s)disagree.*split.count 3.*expected: +1"):
        open_checkpoint(directory / "renamed.gguf")


def test_part_names() -> None:
    assert part_names("plain.gguf") == ["plain.gguf"]
    assert part_names("m-00001-of-00000.gguf") == ["m-00001-of-00000.gguf"]
    assert part_names("m-00002-of-00002.gguf") == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


def test_large_vocabulary_opens_quickly(tmp_path: Path) -> None:
    """50,000 tokens and 50,000 merges. About 0.05 s of processor time; the bound leaves slack."""
    words = b"".join(gguf_string(f"token{index}") for index in range(50_000))
    arrays = [gguf_pair(key, ARRAY, gguf_array(STRING, 50_000, words)) for key in ("a", "b")]
    path = write(tmp_path / "m.gguf", raw_gguf([ARCHITECTURE, *arrays]))
    begin = time.process_time()
    checkpoint = open_checkpoint(path)
    assert time.process_time() - begin < 1.0
    assert checkpoint.metadata["b"][49_999] == "token49999"
