"""Feeds damaged checkpoint files to the readers. Run as a program, in a process of its own.

    python -m support.fuzz_readers gguf|safetensors|quantized|split|index DIR EXAMPLES

It limits its own memory, so that a reader that believes a lying length dies instead of swapping,
and leaves with a traceback if anything but CheckpointError comes out, if an opened file yields a
tensor outside of it, or if one file takes longer than a second of processor time. Prints how many
files were refused and how many opened, as JSON.
"""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.checkpoints import TensorEntry, open_checkpoint
from freetoken.errors import CheckpointError
from support.checkpoint_files import (
    UINT32,
    RawTensor,
    gguf_pair,
    raw_gguf,
    raw_safetensors,
    sample_gguf,
    sample_quantized,
    sample_safetensors,
    write_config,
)

EXTRA_MEMORY_BYTES = 256 << 20
EXAMPLE_LIMIT_S = 1.0
SWEEP_STEP = 5  # prime to the 24 numbers tried at each place, so that all of them occur
EXTREMES = (0, 1, 31, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63, (1 << 64) - 1)

outcomes: Counter[str] = Counter()


def check(directory: Path, name: str, content: bytes) -> None:
    """Put `content` in place of file `name` (as a new file: the old one may be mapped), open."""
    path = directory / name
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    begin = time.process_time()
    try:
        checkpoint = open_checkpoint(directory)
        outcomes["opened"] += 1
        for tensor in list(checkpoint.names()):
            check_tensor(checkpoint.tensor(tensor))
    except CheckpointError as error:
        assert len(str(error)) < 10_000
        outcomes["refused"] += 1
    assert time.process_time() - begin < EXAMPLE_LIMIT_S, f"slow: {content!r}"


def check_tensor(entry: TensorEntry) -> None:
    elements = math.prod(entry.shape)
    block = entry.format
    assert len(entry.data) == elements // block.block_elements * block.block_bytes
    assert len(entry.data) <= entry.file.stat().st_size
    whole = entry.data.base
    assert whole is not None and len(whole) == entry.file.stat().st_size
    if elements:
        assert np.shares_memory(entry.data, whole)
    numbers = entry.dequantize()
    assert numbers.shape == entry.shape and numbers.dtype == np.float32


def overwrites(content: bytes, end: int) -> Iterator[bytes]:
    """Each extreme number at each place of the header, in 1, 4 and 8 bytes."""
    for start in range(end):
        for value in EXTREMES:
            for layout in ("<B", "<I", "<Q"):
                if value < 1 << 8 * struct.calcsize(layout):
                    raw = struct.pack(layout, value)
                    yield content[:start] + raw + content[start + len(raw) :]


@st.composite
def mutations(draw: st.DrawFn, content: bytes) -> bytes:
    """One to four of: bytes overwritten, removed, inserted, repeated; the end cut off or added."""
    places = st.integers(0, len(content))
    for _ in range(draw(st.integers(1, 4))):
        start, other = draw(places), draw(places)
        begin, end = min(start, other), max(start, other)
        kind = draw(
            st.sampled_from(["overwrite", "number", "remove", "insert", "repeat", "cut", "add"])
        )
        rubbish = draw(st.binary(min_size=1, max_size=12))
        number = struct.pack("<Q", draw(st.integers(0, (1 << 64) - 1)))
        content = {
            "overwrite": content[:start] + rubbish + content[start + len(rubbish) :],
            "number": content[:start] + number + content[start + 8 :],
            "remove": content[:begin] + content[end:],
            "insert": content[:start] + rubbish + content[start:],
            "repeat": content[:end] + content[begin:end] + content[end:],
            "cut": content[:end],
            "add": content + rubbish,
        }[kind]
    return content


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
sizes = st.integers(-2, 70) | st.sampled_from([1 << 31, 1 << 62, 1 << 64, -(1 << 63)]) | json_values


def or_rubbish(good: object, bad: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.just(good) | st.just(good) | bad


descriptions = st.fixed_dictionaries(
    {
        "dtype": or_rubbish("F32", st.sampled_from(["BF16", "F4", "I64", "F33"]) | json_values),
        "shape": or_rubbish([2], st.lists(sizes, max_size=3) | json_values),
        "data_offsets": or_rubbish([0, 8], st.lists(sizes, max_size=3) | json_values),
    }
)


@st.composite
def safetensors_headers(draw: st.DrawFn) -> bytes:
    """A well-formed length and JSON, mostly of the right structure, with wrong values."""
    names = st.sampled_from(["__metadata__", "a", "b"]) | st.text(max_size=4)
    tensors = st.dictionaries(names, descriptions | json_values, min_size=1, max_size=3)
    single = st.fixed_dictionaries({"a": descriptions})
    text = json.dumps(draw(single | tensors | json_values)).encode()
    return struct.pack("<Q", len(text)) + text + bytes(draw(st.sampled_from([8, 0, 300])))


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def fuzz(strategy: st.SearchStrategy[bytes], examples: int, run: Callable[[bytes], None]) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def attempt(content: bytes) -> None:
        run(content)

    attempt()


def fuzz_gguf(directory: Path, examples: int) -> None:
    content = sample_gguf()
    header_bytes = content.index(b"kq") + 64
    for mutated in islice(overwrites(content, header_bytes), 0, None, SWEEP_STEP):
        check(directory, "m.gguf", mutated)
    fuzz(mutations(content), examples, partial(check, directory, "m.gguf"))


def fuzz_safetensors(directory: Path, examples: int) -> None:
    write_config(directory)
    content = sample_safetensors()
    run = partial(check, directory, "model.safetensors")
    for mutated in overwrites(content, 32):
        run(mutated)
    fuzz(mutations(content), examples, run)
    fuzz(safetensors_headers(), examples, run)


def fuzz_quantized(directory: Path, examples: int) -> None:
    run = partial(check, directory, "model.safetensors")
    types = ("F32", "BF16", "U8", "I8", "F8_E4M3", "F8_E8M0")
    for config, content in sample_quantized().values():
        write_config(directory, quantization_config=config)
        run(content)
        length = struct.unpack("<Q", content[:8])[0]
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        for name, info in header.items():
            for changed in (
                *(info | {"dtype": kind} for kind in types),
                *(info | {"shape": list(shape)} for shape in reshaped(info["shape"])),
            ):
                run(raw_safetensors(header | {name: changed}, data))
            run(raw_safetensors({k: v for k, v in header.items() if k != name}, data))
            run(raw_safetensors({"x" if k == name else k: v for k, v in header.items()}, data))
        fuzz(mutations(content), examples // 5, run)
    schemes = {"quantization": json_values | st.fixed_dictionaries({"quant_algo": json_values})}
    settings = st.fixed_dictionaries({"quantization_config": json_values}) | json_values

    def configured(content: bytes) -> None:
        write_config(directory, **json.loads(content))
        run(sample_safetensors())

    objects = settings.filter(lambda value: isinstance(value, dict) and "model_type" not in value)
    fuzz(objects.map(lambda value: json.dumps(value).encode()), examples // 2, configured)
    write_config(directory)
    run = partial(check, directory, "hf_quant_config.json")
    fuzz(st.fixed_dictionaries(schemes).map(lambda v: json.dumps(v).encode()), examples // 2, run)


def reshaped(shape: list[int]) -> Iterator[tuple[int, ...]]:
    """Other shapes of as many numbers."""
    count = math.prod(shape)
    yield from ((count,), (1, count), (count, 1), (1, 1, count), (count, 1, 1, 1), (1, *shape))
    yield from ((0, count), ()) if count == 1 else ()


def fuzz_split(directory: Path, examples: int) -> None:
    parts = [split_part(number) for number in (0, 1)]
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    for number in (0, 1):
        (directory / names[1 - number]).write_bytes(parts[1 - number])
        run = partial(check, directory, names[number])
        for mutated in islice(overwrites(parts[number], 160), 0, None, SWEEP_STEP):
            run(mutated)
        fuzz(mutations(parts[number]), examples, run)


def split_part(number: int) -> bytes:
    values = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
    pairs = [gguf_pair(key, UINT32, struct.pack("<I", value)) for key, value in values.items()]
    return raw_gguf(pairs, [RawTensor(f"t{number}", (32,), 8, 0)], bytes(range(34)))


def fuzz_index(directory: Path, examples: int) -> None:
    write_config(directory)
    shard = "model-00001-of-00001.safetensors"
    (directory / shard).write_bytes(sample_safetensors())
    names = ("a.weight", "b.weight", "c", "empty", "ids")
    content = json.dumps({"weight_map": dict.fromkeys(names, shard)}).encode()
    run = partial(check, directory, "model.safetensors.index.json")
    fuzz(mutations(content), examples, run)
    files = st.sampled_from([shard, "/dev/zero", "..", "config.json"]) | json_values
    maps = st.dictionaries(st.sampled_from(names) | st.text(max_size=3), files, max_size=6)
    trees = (st.fixed_dictionaries({"weight_map": maps | json_values}) | json_values).map(
        lambda value: json.dumps(value).encode()
    )
    fuzz(trees, examples, run)


def main() -> None:
    kind, directory, examples = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    targets = {
        "gguf": fuzz_gguf,
        "safetensors": fuzz_safetensors,
        "quantized": fuzz_quantized,
        "split": fuzz_split,
        "index": fuzz_index,
    }
    os.chdir(directory)
    limit_memory()
    targets[kind](directory, examples)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
