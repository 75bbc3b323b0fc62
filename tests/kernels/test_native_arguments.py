"""What the native layer accepts, and how it refuses the rest: by the name of the argument."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from freetoken import _native
from freetoken.errors import ConfigError
from freetoken.kernels.cpu import CpuOps

H, INNER, E = 64, 32, 3


@pytest.fixture(scope="module")
def context() -> Iterator[_native.Context]:
    context = _native.Context(2)
    yield context
    context.close()


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def matrix(rows: int, cols: int, seed: int = 0) -> _native.Matrix:
    weights = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    return _native.Matrix(_native.Format.F32, weights.reshape(-1).view(np.uint8), rows, cols)


def part(rows: int, cols: int, seed: int) -> tuple[_native.ExpertPart, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((E, rows, cols)).astype(np.float32)
    codes = np.array([expert.ctypes.data for expert in weights], np.uint64)
    unused = np.zeros(E, np.uint64)
    native = _native.ExpertPart(_native.Format.F32, rows, cols, codes, unused, 4 * cols, 4, 0, 0)
    return native, weights


def sums(tokens: int) -> Tensor:
    """Room for what experts add up to."""
    return torch.zeros(tokens, H, dtype=torch.float64)


def test_scales_of_a_matrix_are_checked() -> None:
    mxfp4, q8_0 = _native.Format.MXFP4_PAIRS, _native.Format.Q8_0
    codes, scales = np.zeros(4 * 32, np.uint8), np.zeros(4 * 2, np.uint8)
    assert _native.Matrix(mxfp4, codes, 4, 64, scales, 2.0).rows == 4
    with pytest.raises(ValueError, match=r"scales: found none.*MXFP4_PAIRS has its scales apart"):
        _native.Matrix(mxfp4, codes, 4, 64)
    with pytest.raises(ValueError, match=r"scales: found some.*Q8_0 has its scales in its blocks"):
        _native.Matrix(q8_0, np.zeros(34, np.uint8), 1, 32, scales)
    with pytest.raises(ValueError, match=r"scales: .*8"):
        _native.Matrix(mxfp4, codes, 4, 64, scales[:7])
    fp8 = _native.Format.FP8_128
    assert _native.Matrix(fp8, np.zeros(576 * 130, np.uint8), 576, 130, np.zeros(40, np.uint8))
    with pytest.raises(ValueError, match=r"scales: .*40"):
        _native.Matrix(fp8, np.zeros(576 * 130, np.uint8), 576, 130, np.zeros(32, np.uint8))


@pytest.mark.parametrize("what", ["factors", "biases"])
def test_factors_and_biases_of_experts_are_checked(what: str) -> None:
    weights = np.zeros((E, INNER, H), np.float32)
    codes = np.array([expert.ctypes.data for expert in weights], np.uint64)
    unused = np.zeros(E, np.uint64)

    def part_with(addresses: npt.NDArray[np.uint64]) -> _native.ExpertPart:
        return _native.ExpertPart(
            _native.Format.F32, INNER, H, codes, unused, 4 * H, 4, 0, 0, **{what: addresses}
        )

    assert part_with(codes).rows == INNER
    with pytest.raises(ValueError, match=f"{what}: found 2 addresses, expected one for each of 3"):
        part_with(codes[:2])
    with pytest.raises(ValueError, match=f"{what}: found a null address"):
        part_with(unused)


def bank() -> _native.ExpertBank:
    gate, gate_data = part(INNER, H, 1)
    up, up_data = part(INNER, H, 2)
    down, down_data = part(H, INNER, 3)
    owner = (gate_data, up_data, down_data)
    return _native.ExpertBank(gate, up, down, _native.Activation.SiLU, owner)


def test_torch_numpy_and_parameters_give_the_same(context: _native.Context) -> None:
    x, weight = torch.randn(3, H), torch.rand(H)
    outs = [zeros(3, H) for _ in range(3)]
    context.rms_norm(x, weight, 1e-6, outs[0])
    context.rms_norm(x.numpy(), weight.numpy(), 1e-6, outs[1].numpy())
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    context.rms_norm(x, parameter, 1e-6, outs[2])
    assert outs[0].abs().sum() > 0
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_read_only_inputs_are_fine_and_read_only_outputs_are_not(context: _native.Context) -> None:
    x = np.ones((2, H), np.float32)
    x.flags.writeable = False
    context.rms_norm(x, np.ones(H, np.float32), 1e-6, np.zeros((2, H), np.float32))
    with pytest.raises(TypeError, match=r"out: .*expected a writable array"):
        context.rms_norm(x, np.ones(H, np.float32), 1e-6, x)


def test_strides_of_dimensions_of_one_do_not_matter(context: _native.Context) -> None:
    row = torch.randn(4, H)[2:3]
    sliced = torch.randn(1, 2 * H)[:, :H]  # contiguous, for its only row is
    out = zeros(1, H)
    context.rms_norm(row, torch.ones(H), 1e-6, out)
    context.rms_norm(sliced, torch.ones(H), 1e-6, out)
    context.rms_norm(zeros(0, H), torch.ones(H), 1e-6, zeros(0, H))


@pytest.mark.parametrize(
    ("x", "problem"),
    [
        ("nothing", "x: found an object of type str, expected a torch tensor or a NumPy array"),
        (zeros(2, H, dtype=torch.float64), "x: found float64, expected float32"),
        (zeros(2, H, dtype=torch.bfloat16), "x: found bfloat16, expected float32"),
        (np.zeros((2, H), np.float64), "x: found items of type 'd', expected float32"),
        (np.zeros((2, H), ">f4"), "x: found items of type '>f', expected float32"),
        (zeros(H), r"x: found shape \[64\], expected 2 dimensions"),
        (np.zeros(H, np.float32), r"x: found shape \[64\], expected 2 dimensions"),
        (zeros(1, 1, 1, 2, H), "x: found 5 dimensions, expected at most 4"),
        (zeros(H, 2).T, "x: found strided memory, expected contiguous memory"),
        (zeros(4, H)[::2], "x: found strided memory"),
        (np.zeros((4, H), np.float32)[:, ::-1], "x: found strided memory"),
        (torch.zeros(2, H, device="meta"), "x|meta"),
    ],
)
def test_refused_arrays(context: _native.Context, x: object, problem: str) -> None:
    with pytest.raises((TypeError, BufferError, RuntimeError), match=problem):
        context.rms_norm(x, torch.ones(H), 1e-6, zeros(2, H))  # type: ignore[arg-type]


Call = Callable[[_native.Context], None]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda c: c.linear((matrix(5, H),), zeros(2, 32), (None,), (zeros(2, 5),)),
            r"x: found shape \[2, 32\], expected \[any, 64\]",
        ),
        (
            lambda c: c.linear((matrix(5, H),), zeros(2, H), (None,), (zeros(2, 4),)),
            r"out: found shape \[2, 4\], expected \[2, 5\]",
        ),
        (
            lambda c: c.linear((matrix(5, H),), zeros(2, H), (zeros(4),), (zeros(2, 5),)),
            r"bias: found shape \[4\], expected \[5\]",
        ),
        (
            lambda c: c.embed(matrix(5, H), torch.tensor([0, 5]), zeros(2, H)),
            "ids: found 5 at position 1, expected numbers from 0 to 4",
        ),
        (
            lambda c: c.rms_norm(zeros(2, H), zeros(63), 1e-6, zeros(2, H)),
            r"weight: found shape \[63\], expected \[64\]",
        ),
        (
            lambda c: c.add_rms_norm(zeros(2, H), zeros(1, H), zeros(H), 1e-6, zeros(2, H)),
            r"residual: found shape \[1, 64\], expected \[2, 64\] like x",
        ),
        (
            lambda c: c.gated_activation(
                zeros(2, H), zeros(2, 32), _native.Activation.GELU, 0.0, 0.0, zeros(2, H)
            ),
            r"up: found shape \[2, 32\], expected \[2, 64\] like gate",
        ),
        (
            lambda c: c.rotary(zeros(2, 4, 8), zeros(2, 2, 8), zeros(2, 5), zeros(2, 5), False),
            "cos: found 5 angles, expected at most half of the head's 8",
        ),
        (
            lambda c: c.write_kv(
                zeros(1, 2, 8),
                zeros(1, 2, 8),
                zeros(3, 4, 2, 8),
                zeros(3, 4, 2, 8),
                torch.tensor([12]),
            ),
            "slots: found 12 at position 0, expected numbers from 0 to 11",
        ),
        (
            lambda c: c.route_topk(zeros(2, 4), True, zeros(2, 5), zeros(2, 5, dtype=torch.int32)),
            "weights: found top_k 5, expected 1 to the 4 experts",
        ),
        (
            lambda c: c.experts(
                bank(),
                zeros(1, H),
                zeros(1, 2),
                torch.tensor([[0, E]], dtype=torch.int32),
                sums(1),
            ),
            "ids: found 3 at position 1, expected numbers from -1 to 2",
        ),
        (
            lambda c: c.experts(
                bank(), zeros(1, H), zeros(1, 3), zeros(1, 2, dtype=torch.int32), sums(1)
            ),
            r"ids: found shape \[1, 2\], expected \[1, 3\] like weights",
        ),
    ],
)
def test_refused_shapes_and_values(context: _native.Context, call: Call, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call(context)


def attend(context: _native.Context, **changes: object) -> Tensor:
    arguments: dict[str, object] = {
        "q": torch.randn(3, 4, 8),
        "k_cache": torch.randn(5, 4, 2, 8),
        "v_cache": torch.randn(5, 4, 2, 8),
        "block_table": torch.tensor([[1, 2], [3, 99]], dtype=torch.int32),
        "sequence": torch.tensor([0, 0, 1], dtype=torch.int32),
        "positions": torch.tensor([3, 4, 3], dtype=torch.int32),
        "scale": 0.3,
        "window": None,
        "sinks": None,
        "out": zeros(3, 4, 8),
    }
    arguments.update(changes)
    context.paged_attention(**arguments)  # type: ignore[arg-type]
    out = arguments["out"]
    assert isinstance(out, Tensor)
    return out


def test_attention_reads_only_pages_that_exist(context: _native.Context) -> None:
    assert attend(context).abs().sum() > 0  # the page 99 is not used
    with pytest.raises(ValueError, match="block_table: found a page out of range for sequence 1"):
        attend(context, positions=torch.tensor([3, 4, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match="positions: found 8 at position 1"):
        attend(context, positions=torch.tensor([3, 8, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="sequence: found 2 at position 2"):
        attend(context, sequence=torch.tensor([0, 0, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="q: found 3 heads, expected a multiple of the 2"):
        attend(context, q=zeros(3, 3, 8), out=zeros(3, 3, 8))
    with pytest.raises(ValueError, match=r"sinks: found shape \[2\], expected \[4\]"):
        attend(context, sinks=zeros(2))
    with pytest.raises(ValueError, match="window: expected at least 1"):
        attend(context, window=0)


def test_a_matrix_checks_its_bytes() -> None:
    data = np.zeros(100, np.uint8)
    with pytest.raises(ValueError, match=r"data: found shape \[100\], expected \[512\]"):
        _native.Matrix(_native.Format.F32, data, 2, H)
    with pytest.raises(ValueError, match="whole blocks of 32 columns for Q8_0"):
        _native.Matrix(_native.Format.Q8_0, data, 2, 33)


def test_a_bank_checks_that_its_parts_agree() -> None:
    gate, _ = part(INNER, H, 1)
    with pytest.raises(ValueError, match="down: found 3 experts of 32 x 64, expected 3 of 64 x 32"):
        _native.ExpertBank(gate, gate, gate, _native.Activation.SiLU, None)
    null = np.zeros(E, np.uint64)
    with pytest.raises(ValueError, match="codes: found a null address"):
        _native.ExpertPart(_native.Format.F32, INNER, H, null, null, 4 * H, 4, 0, 0)


def test_expert_sums_are_float64(context: _native.Context) -> None:
    ids = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(TypeError, match="out: found float32, expected float64"):
        context.experts(bank(), zeros(1, H), zeros(1, 1), ids, zeros(1, H))
    with pytest.raises(TypeError, match="out: found items of type 'f', expected float64"):
        context.experts(bank(), zeros(1, H), zeros(1, 1), ids, np.zeros((1, H), np.float32))


def test_submitted_work_equals_direct_work_and_outlives_its_arrays(
    context: _native.Context,
) -> None:
    weights, ids = torch.rand(2, 2), torch.tensor([[0, 2], [-1, 1]], dtype=torch.int32)
    x, direct, submitted = torch.randn(2, H), sums(2), sums(2)
    context.experts(bank(), x, weights, ids, direct)
    pending = context.experts_submit(bank(), x.clone(), weights.clone(), ids.clone(), submitted)
    gc.collect()
    pending.wait()
    pending.wait()
    assert pending.done
    assert direct.abs().sum() > 0 and torch.equal(direct, submitted)


def test_forgotten_work_is_finished_before_its_arrays_go(context: _native.Context) -> None:
    weights, ids = torch.rand(4, 2), torch.ones(4, 2, dtype=torch.int32)
    for _ in range(50):
        context.experts_submit(bank(), torch.randn(4, H), weights, ids, sums(4))
    gc.collect()


def test_work_without_routes_is_done_at_once(context: _native.Context) -> None:
    out = sums(1) + 1
    ids = torch.tensor([[-1, 1]], dtype=torch.int32)
    pending = context.experts_submit(bank(), zeros(1, H), torch.tensor([[1.0, 0.0]]), ids, out)
    assert pending.done and torch.equal(out, sums(1))
    pending.wait()


def test_threads_of_python_may_share_a_context(context: _native.Context) -> None:
    x, weights = torch.randn(2, H), torch.rand(2, 2)
    ids = torch.tensor([[0, 2], [1, 1]], dtype=torch.int32)
    shared, expected = bank(), sums(2)
    context.experts(shared, x, weights, ids, expected)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(100):
            out = sums(2)
            if number % 2:
                context.experts(shared, x, weights, ids, out)
            else:
                context.experts_submit(shared, x, weights, ids, out).wait()
            if not torch.equal(out, expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_closed_context_says_so() -> None:
    context = _native.Context(1)
    context.close()
    context.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        context.rms_norm(zeros(1, H), zeros(H), 1e-6, zeros(1, H))
    with pytest.raises(RuntimeError, match="has been closed"):
        context.place(bank(), mapped=True)
    with pytest.raises(RuntimeError, match="has been closed"):
        context.place_matrix(matrix(2, H))


def test_threads_and_isa_are_checked() -> None:
    assert "scalar" in _native.detected_isas()
    assert _native.Context(3).threads == 3
    assert len(_native.physical_cpus()) >= 1
    assert len(_native.Context(3).nodes) == 3
    with pytest.raises(ConfigError, match="threads: found 0, expected 1 to 1024"):
        CpuOps(threads=0)
    with pytest.raises(ConfigError, match="mmx"):
        CpuOps(isa="mmx")
