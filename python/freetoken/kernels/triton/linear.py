"""Products with weight matrices, dequantised on the way.

A few tokens are a matter of reading the weights: every program reads some rows and multiplies them
with one token in float32, and the programs of one block of rows lie side by side, so that all
but the first find it in the L2 cache. Many tokens go through the tensor cores in bfloat16, or, for
float32 weights, through float32 products. A token's result depends on which of the two it is, but
not on the other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton.compile_cases import CompileCase
from freetoken.kernels.triton.formats import TRITON_FORMATS
from freetoken.kernels.triton.fp8 import fp8_rounded
from freetoken.kernels.triton.matrix import TritonMatrix
from freetoken.kernels.triton.products import FUSED, dot, row_products

FEW_TOKENS = 4  # that are multiplied one by one
MOST_MATRICES = 3  # of one launch
_COLUMNS = 1024  # of a step: with 4-bit weights, 16 bytes of a row for each thread of a warp
_FEW_OPTIONS = {"num_warps": 4, **FUSED}
_MANY_OPTIONS = {"num_warps": 4, "num_stages": 2, **FUSED}
_PROGRAMS = 512  # that keep a large GPU's memory busy: about four per multiprocessor


@triton.jit(
    do_not_specialize=["rows0", "rows1", "rows2", "tokens"],  # a size of one is no constant
)
def few_tokens_kernel(
    x_ptr,
    out_ptr,
    codes0_ptr,
    codes1_ptr,
    codes2_ptr,
    scales0_ptr,
    scales1_ptr,
    scales2_ptr,
    bias0_ptr,
    bias1_ptr,
    bias2_ptr,
    rows0,
    rows1,
    rows2,
    factor0,
    factor1,
    factor2,
    tokens,
    cols,
    code_row_stride,
    scale_row_stride,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    WHOLE_UNITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One token and BLOCK_R rows of one of three matrices, whose blocks of rows follow one another
    (rows of zero: there is none). All have the same format, columns and strides. The outputs,
    [tokens, rows] of each matrix, lie one after the other.

    WHOLE_UNITS: whether the columns are a multiple of what DOT adds up at once; few are not."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks0 = tl.cdiv(rows0, BLOCK_R)
    blocks1 = tl.cdiv(rows1, BLOCK_R)
    codes_ptr, scales_ptr, bias_ptr = codes0_ptr, scales0_ptr, bias0_ptr
    rows, factor = rows0, factor0
    if block >= blocks0 + blocks1:
        block -= blocks0 + blocks1
        out_ptr += tokens.to(tl.int64) * (rows0 + rows1)
        codes_ptr, scales_ptr, bias_ptr = codes2_ptr, scales2_ptr, bias2_ptr
        rows, factor = rows2, factor2
    elif block >= blocks0:
        block -= blocks0
        out_ptr += tokens.to(tl.int64) * rows0
        codes_ptr, scales_ptr, bias_ptr = codes1_ptr, scales1_ptr, bias1_ptr
        rows, factor = rows1, factor1
    codes_ptr = tl.multiple_of(codes_ptr, 16)
    scales_ptr = tl.multiple_of(scales_ptr, 16)

    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < rows
    sums = row_products(
        codes_ptr,
        scales_ptr,
        row.to(tl.int64),
        inside,
        x_ptr + token * cols,
        cols,
        code_row_stride,
        scale_row_stride,
        DOT,
        TILE,
        SCALE_ROWS,
        WHOLE_UNITS,
        BLOCK_K,
    )
    out = sums * factor
    if HAS_BIAS:
        out += tl.load(bias_ptr + row, mask=inside, other=0.0)
    tl.store(out_ptr + token * rows + row, out, mask=inside)


@triton.jit(do_not_specialize=["tokens", "rows"])
def many_tokens_kernel(
    x_ptr,
    out_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    tokens,
    rows,
    factor,
    cols,
    code_row_stride,
    scale_row_stride,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_T tokens and BLOCK_R rows: rounded to bfloat16 and multiplied on tensor cores, or, if
    EXACT, multiplied in float32."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    inside = row < rows
    x_ptr += token.to(tl.int64)[:, None] * cols
    sums = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for k0 in range(0, cols, BLOCK_K):
        mask = (token < tokens)[:, None] & (k0 + k < cols)[None, :]
        x = tl.load(x_ptr + (k0 + k)[None, :], mask=mask, other=0.0)
        w = TILE(
            codes_ptr, scales_ptr, row, inside, k0, cols, code_row_stride, scale_row_stride, BLOCK_K
        )
        if not EXACT:
            x = x.to(tl.bfloat16)
            w = w.to(tl.bfloat16)
        sums = dot(x, tl.trans(w), sums)
    out = sums * factor
    if HAS_BIAS:
        out += tl.load(bias_ptr + row, mask=inside, other=0.0)[None, :]
    at = token.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(out_ptr + at, out, mask=(token < tokens)[:, None] & inside[None, :])


def linear_group(
    x: Tensor, matrices: Sequence[TritonMatrix], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """x float32 [T, H] times each matrix [N, H], plus its bias float32 [N]: float32 [T, N] each."""
    if x.shape[0] <= FEW_TOKENS and _alike(matrices, biases):
        return _few_tokens(x, matrices, biases)
    return [linear(x, w, bias) for w, bias in zip(matrices, biases, strict=True)]


def linear(x: Tensor, w: TritonMatrix, bias: Tensor | None) -> Tensor:
    """x float32 [T, H] times a matrix [N, H], plus a bias float32 [N]: float32 [T, N]."""
    if x.shape[0] <= FEW_TOKENS:
        return _few_tokens(x, (w,), (bias,))[0]
    return _many_tokens(x, w, bias)


def _alike(matrices: Sequence[TritonMatrix], biases: Sequence[Tensor | None]) -> bool:
    """Whether one launch can compute them: the same format, and all with a bias or none."""
    first = matrices[0]
    return len(matrices) <= MOST_MATRICES and all(
        w.weight_format is first.weight_format and (bias is None) == (biases[0] is None)
        for w, bias in zip(matrices, biases, strict=True)
    )


def _few_tokens(
    x: Tensor, matrices: Sequence[TritonMatrix], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    tokens = x.shape[0]
    first = matrices[0]
    if first.format.reads_fp8:
        x = fp8_rounded(x)
    sizes = [w.rows for w in matrices]
    out = torch.empty(tokens * sum(sizes), device=x.device)
    absent = MOST_MATRICES - len(matrices)
    w = (*matrices, *[first] * absent)
    bias = (*(out if b is None else b for b in biases), *[out] * absent)
    rows = (*sizes, *[0] * absent)
    whole_units = first.cols % first.format.unit == 0
    block_r, block_k = _few_tokens_tile(first, sum(sizes), whole_units)
    few_tokens_kernel[(tokens, sum(triton.cdiv(n, block_r) for n in rows))](
        x,
        out,
        *(m.codes for m in w),
        *(m.scales for m in w),
        *bias,
        *rows,
        *(m.factor for m in w),
        tokens,
        first.cols,
        first.code_row_stride,
        first.scale_row_stride,
        TILE=first.format.tile,
        DOT=first.format.dot,
        WHOLE_UNITS=whole_units,
        SCALE_ROWS=first.format.scale_rows,
        HAS_BIAS=biases[0] is not None,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        **_FEW_OPTIONS,
    )
    parts = torch.split(out, [tokens * n for n in sizes])
    return [part.view(tokens, n) for part, n in zip(parts, sizes, strict=True)]


def _few_tokens_tile(w: TritonMatrix, rows: int, whole_units: bool) -> tuple[int, int]:
    """BLOCK_R and BLOCK_K: wide steps, and as many rows as leave programs enough."""
    fmt = w.format
    block_k = min(_COLUMNS, triton.next_power_of_2(w.cols))
    if whole_units:
        block_k = max(block_k, fmt.unit)
    else:
        block_k = max(min(block_k, fmt.most_block_k), fmt.least_block_k)
    block_r = 4
    while block_r > 1 and rows < block_r * _PROGRAMS:
        block_r //= 2
    return block_r, block_k


def _many_tokens(x: Tensor, w: TritonMatrix, bias: Tensor | None) -> Tensor:
    tokens = x.shape[0]
    if w.format.reads_fp8:
        x = fp8_rounded(x)
    out = torch.empty(tokens, w.rows, device=x.device)
    block_t, block_r = _many_tokens_tile(tokens, w.format.exact)
    many_tokens_kernel[(triton.cdiv(tokens, block_t), triton.cdiv(w.rows, block_r))](
        x,
        out,
        w.codes,
        w.scales,
        out if bias is None else bias,
        tokens,
        w.rows,
        w.factor,
        w.cols,
        w.code_row_stride,
        w.scale_row_stride,
        TILE=w.format.tile,
        HAS_BIAS=bias is not None,
        EXACT=w.format.exact,
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        BLOCK_K=w.format.block_k,
        **_MANY_OPTIONS,
    )
    return out


def _many_tokens_tile(tokens: int, exact: bool) -> tuple[int, int]:
    """BLOCK_T and BLOCK_R. Every program dequantises its rows for itself, so many tokens share a
    tile where there are many; float32 products have no tensor cores and keep to small tiles."""
    if exact:
        return 32, 32
    return min(128, max(16, triton.next_power_of_2(tokens))), 64


_FEW = {f"{what}{i}_ptr": "*u8" for what in ("codes", "scales") for i in range(3)}
_FEW |= {f"bias{i}_ptr": "*fp32" for i in range(3)}
_FEW |= {f"rows{i}": "i32" for i in range(3)} | {f"factor{i}": "fp32" for i in range(3)}
_COMMON = {"x_ptr": "*fp32", "out_ptr": "*fp32", "tokens": "i32", "cols": "i32"}
_COMMON |= {"code_row_stride": "i32", "scale_row_stride": "i32"}
_MANY = _COMMON | {"codes_ptr": "*u8", "scales_ptr": "*u8", "bias_ptr": "*fp32"}
_MANY |= {"rows": "i32", "factor": "fp32"}


def _few_case(name: str, bias: bool, block_r: int, whole_units: bool = True) -> CompileCase:
    fmt = TRITON_FORMATS[name]
    constants: dict[str, object] = {
        "TILE": fmt.tile,
        "DOT": fmt.dot,
        "WHOLE_UNITS": whole_units,
        "SCALE_ROWS": fmt.scale_rows,
        "HAS_BIAS": bias,
        "BLOCK_R": block_r,
        "BLOCK_K": _COLUMNS,
    }
    name = f"linear_few_{name}{'' if whole_units else '_any_columns'}"
    return CompileCase(name, few_tokens_kernel, _COMMON | _FEW, constants, _FEW_OPTIONS)


def _many_case(name: str, bias: bool, block_t: int, block_r: int) -> CompileCase:
    fmt = TRITON_FORMATS[name]
    constants: dict[str, object] = {
        "TILE": fmt.tile,
        "HAS_BIAS": bias,
        "EXACT": fmt.exact,
        "BLOCK_T": block_t,
        "BLOCK_R": block_r,
        "BLOCK_K": fmt.block_k,
    }
    return CompileCase(f"linear_many_{name}", many_tokens_kernel, _MANY, constants, _MANY_OPTIONS)


COMPILE_CASES = [
    _few_case("BF16", bias=True, block_r=4),
    _few_case("BF16", bias=False, block_r=1, whole_units=False),
    _few_case("Q4_K", bias=False, block_r=2),
    _few_case("FP8_128", bias=False, block_r=4),
    _many_case("BF16", bias=True, block_t=16, block_r=64),
    _many_case("Q4_K", bias=False, block_t=128, block_r=64),
    _many_case("F32", bias=False, block_t=32, block_r=32),
]
