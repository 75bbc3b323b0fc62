"""What the measurements count and report. Their speeds are not tested."""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from freetoken.bench import ExpertShape, blocks, formats_with_kernels, measure_experts, memory
from freetoken.bench import experts as experts_module
from freetoken.bench.model import decode_bytes
from freetoken.checkpoints import open_checkpoint
from freetoken.cli.app import app
from freetoken.errors import CapacityError, ConfigError
from freetoken.formats import FORMATS, by_name
from freetoken.kernels.cpu import CpuOps
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model, tiny_config

SMALL = ExpertShape(hidden=256, intermediate=256, experts=6, top_k=2)
Ft = Callable[..., Result]


@pytest.fixture
def ft(monkeypatch: pytest.MonkeyPatch) -> Ft:
    """Run `ft bench` in this process, over little memory."""
    monkeypatch.setattr(memory, "_LEAST_POOL_BYTES", 1 << 20)
    monkeypatch.setattr(memory, "_POOL_CACHES", 0)
    monkeypatch.setattr(experts_module, "_READ_BYTES", 1 << 18)
    return lambda *arguments: CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral without a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_gguf(make_model(tiny_config("mixtral", hidden_size=96, intermediate_size=64)), path)
    return path


SIZES = ("--hidden", 256, "--intermediate", 256, "--experts", 6, "--top-k", 2, "--calls", 3)


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_are_finite_and_of_sane_size(name: str) -> None:
    fmt = by_name(name)
    matrix = blocks.random_matrix(fmt, 256, 512, np.random.default_rng(0))
    assert (matrix.codes.nbytes, matrix.nbytes - matrix.codes.nbytes) == blocks.matrix_bytes(
        fmt, 256, 512
    )
    codes = matrix.codes.reshape(256, -1)
    if matrix.scales is None:
        numbers = fmt.dequantize(codes)
    else:
        plane = fmt.scale_plane(256, 512)
        numbers = fmt.dequantize_planes(codes, matrix.scales.reshape(plane))
    assert np.isfinite(numbers).all()
    assert 0.005 < numbers.std() < 0.3


@pytest.mark.parametrize("name", [fmt.name for fmt in formats_with_kernels()])
def test_experts_of_every_format_with_kernels(name: str, ft: Ft) -> None:
    run = ft("experts", "--format", name, *SIZES, "--tokens", 3, "--json")
    assert run.exit_code == 0, run.stderr
    out = json.loads(run.stdout)
    assert out.keys() >= {"format", "isa", "gbps", "read_gbps", "fraction"}
    assert out["format"] == name and out["tokens"] == 3 and out["calls"] == 3
    assert out["fraction"] == pytest.approx(out["gbps"] / out["read_gbps"])
    matrix = sum(blocks.matrix_bytes(by_name(name), 256, 256))
    assert out["expert_bytes"] == 3 * matrix
    assert 2 <= out["distinct_experts"] <= 6
    assert out["bytes_per_layer"] == pytest.approx(out["distinct_experts"] * out["expert_bytes"])


def test_the_layer_that_is_measured_holds_the_experts_that_it_should() -> None:
    """The kernel's output is the experts' own: every address and stride is right."""
    import torch

    ops = CpuOps(1)
    try:
        for fmt in formats_with_kernels():
            bank = experts_module.random_layer(fmt, SMALL)
            kernel = ops.expert_kernel(bank)
            x, weights = torch.randn(1, 256), torch.ones(1, 1)
            y = [kernel(x, weights, torch.full((1, 1), e, dtype=torch.int32)) for e in range(6)]
            assert all(torch.isfinite(one).all() and one.abs().max() > 0 for one in y), fmt.name
            # Expert 4 repeats the bytes of expert 0, expert 1 has its own.
            torch.testing.assert_close(y[0], y[4], rtol=0, atol=0)
            assert (y[0] != y[1]).any(), fmt.name
    finally:
        ops.close()


def test_a_table_of_all_formats(ft: Ft) -> None:
    run = ft("experts", *SIZES)
    assert run.exit_code == 0, run.stderr
    names = [fmt.name for fmt in formats_with_kernels()]
    assert [line.split()[0] for line in run.stdout.splitlines()[2:]] == names
    listed = ft("experts", "--format", "Q4_0,Q8_0", *SIZES, "--json")
    assert [result["format"] for result in json.loads(listed.stdout)] == ["Q4_0", "Q8_0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "Q9"), "--format: found 'Q9', expected some of F32"),
        (("--format", "Q4_0,"), "--format: found ''"),
        (("--format", "Q4_0,all"), "--format: found 'all'"),
        (("--format", "Q8_0,Q4_K", "--hidden", 96), "--format Q4_K: found 96 columns"),
        (("--hidden", 96), "found 96 columns, expected a multiple of 256"),
        (("--format", "Q4_0", "--threads", 10**12), "threads: found 1000000000000"),
        (("--format", "Q4_0", "--threads", -(10**12)), "threads: found -1000000000000"),
        (("--format", "Q4_K", "--hidden", 96), "found 96 columns, expected a multiple of 256"),
        (("--format", "Q4_0", "--top-k", 65), "--top-k: found 65, expected at most 64"),
        (("--format", "Q4_0", "--tokens", 0), "--tokens: found 0, expected 1 or more"),
        (("--format", "Q4_0", "--isa", "mmx"), "mmx"),
    ],
)
def test_options_that_cannot_be_used(options: tuple[object, ...], message: str, ft: Ft) -> None:
    run = ft("experts", *options)
    assert run.exit_code == 2
    assert message in run.stderr and "Traceback" not in run.stderr
    assert run.stdout == ""  # nothing was measured before


def test_shapes_are_checked() -> None:
    with pytest.raises(ConfigError, match="--intermediate: found 0, expected 1 or more"):
        ExpertShape(intermediate=0)
    with pytest.raises(ConfigError, match="--calls: found 0, expected 1 or more"):
        measure_experts(by_name("Q4_0"), SMALL, calls=0)


def test_memory(ft: Ft) -> None:
    out = json.loads(ft("memory", "--json", "--threads", 1).stdout)
    assert out.keys() >= {"read_gbps", "threads", "buffer_bytes", "passes"}
    assert out["threads"] == 1 and out["buffer_bytes"] == 1 << 20
    assert 0 < out["read_gbps"] <= out["best_gbps"]
    assert "GB/s, 1 threads" in ft("memory", "--threads", 1).stdout


def test_more_memory_than_there_is() -> None:
    with pytest.raises(CapacityError, match=r"needs 1048576\.0 GiB of memory and .*programs$"):
        memory.huge_buffer(1 << 50)


def test_memory_where_the_kernel_has_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutHugePages(mmap.mmap):
        def madvise(self, *_arguments: int) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(memory.mmap, "mmap", WithoutHugePages)
    assert not memory.huge_buffer(1 << 16).any()


@pytest.mark.parametrize(
    "options",
    [("--tokens", 10**9), ("--tokens", 10**30), ("--hidden", 2**40), ("--intermediate", 2**40),
     ("--experts", 10**12)],
)  # fmt: skip
def test_sizes_beyond_the_memory(options: tuple[object, ...], ft: Ft) -> None:
    run = ft("experts", "--format", "Q4_0", *SIZES, *options)
    assert run.exit_code == 1, run.output
    assert "GiB of memory" in run.stderr and run.stdout == ""


def test_memory_that_the_system_refuses(ft: Ft, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    run = ft("memory")
    assert run.exit_code == 1
    assert "refuses: Cannot allocate memory; look at the limits" in run.stderr


def test_a_python_that_runs_out_of_memory(ft: Ft, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(_size_bytes: int, beside_bytes: int = 0) -> None:
        raise MemoryError

    monkeypatch.setattr(memory, "huge_buffer", exhausted)
    run = ft("memory")
    assert run.exit_code == 1 and "out of memory: the system refuses more" in run.stderr


@pytest.mark.parametrize(("prompt", "decode"), [(500, 12), (1, 511), (10**15, 1), (512, 1)])
def test_tokens_beyond_the_context(prompt: int, decode: int, ft: Ft, model: Path) -> None:
    run = ft("model", "--model", model, "--prompt-tokens", prompt, "--decode-tokens", decode)
    assert run.exit_code == 2
    assert "expected at most 511 together (the model's context is 512)" in run.stderr


def test_the_last_tokens_of_the_context(ft: Ft, model: Path) -> None:
    run = ft("model", "--model", model, "--prompt-tokens", 501, "--decode-tokens", 10, "--runs", 1)
    assert run.exit_code == 0, run.stderr


def test_the_last_level_cache_is_the_largest(tmp_path: Path) -> None:
    assert memory.last_level_cache_bytes(tmp_path) == 32 << 20
    for index, size in enumerate(("32K", "1024K", "16M")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert memory.last_level_cache_bytes(tmp_path) == 16 << 20


def test_a_model_without_a_tokenizer(ft: Ft, model: Path) -> None:
    run = ft("model", "--model", model, "--prompt-tokens", 20, "--decode-tokens", 5, "--runs", 1,
             "--json")  # fmt: skip
    assert run.exit_code == 0, run.stderr
    out = json.loads(run.stdout)
    assert out["prefill_tokens_per_s"] > 0 and out["decode_tokens_per_s"] > 0
    assert (out["prompt_tokens"], out["decode_tokens"], out["runs"]) == (20, 5, 1)
    assert out["decode_gbps"] == pytest.approx(
        out["bytes_per_token"] * out["decode_tokens_per_s"] * 1e-9
    )
    text = ft("model", "--model", model, "--prompt-tokens", 4, "--decode-tokens", 2, "--runs", 1)
    assert "prefill of 4 tokens" in text.stdout


def test_bytes_of_a_decoded_token(model: Path) -> None:
    """By hand: 3 layers of attention, router, norms and 2 of 5 experts; the head; one row of the
    embedding."""
    checkpoint = open_checkpoint(model)
    hidden, inner, head_dim, heads, vocab = 96, 64, 20, 3, 101
    attention = 2 * hidden * heads * head_dim + 2 * hidden * head_dim
    q8_0 = 34 / 32
    layer = 4 * (attention + 5 * hidden + 2 * hidden) + 2 * 3 * hidden * inner * q8_0
    assert decode_bytes(checkpoint) == 3 * layer + 4 * (hidden + vocab * hidden + hidden)
    checkpoint.close()
