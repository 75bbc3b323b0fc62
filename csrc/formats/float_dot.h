// Dot products with rows of plain floats, activations in float32. A format supplies
//   kBytes                        bytes of one number
//   F32 load(p), load_partial(p, n)
//   float to_f32(p)
// One (row, token) pair is one vector accumulator over the columns in order, whatever the blocking,
// so its sum does not depend on what else is computed beside it.
#pragma once

#include "ops/kernel_set.h"
#include "simd/simd.h"

namespace ft::FT_ISA_NAMESPACE {

// Loops over accumulators must be unrolled, or the accumulators live in memory.
#define FT_UNROLL _Pragma("GCC unroll 8")

// What to fetch while the rows before `row` are worked on: the next ones, or what is read after the last.
inline const std::uint8_t* codes_ahead(const PackedMatrix& w, std::int64_t row, std::int64_t end) {
  return row >= end && w.codes_after != nullptr ? w.codes_after : w.codes + row * w.code_row_stride;
}

template <class W, int kRows, int kTokens>
void float_dot_block(const PackedMatrix& w, std::int64_t row, const float* const (&x)[kTokens],
                     const std::uint8_t* next, float* y, std::int64_t y_stride) {
  const std::uint8_t* rows[kRows];
  F32 sum[kRows][kTokens];
  FT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    rows[r] = w.codes + (row + r) * w.code_row_stride;
    FT_UNROLL
    for (int t = 0; t < kTokens; ++t) sum[r][t] = F32::zero();
  }
  const std::int64_t whole = w.cols / F32::kWidth * F32::kWidth;
  for (std::int64_t c = 0; c < whole; c += F32::kWidth) {
    F32 xs[kTokens];
    FT_UNROLL
    for (int t = 0; t < kTokens; ++t) xs[t] = F32::load(x[t] + c);
    for (std::int64_t ahead = 0; ahead < kRows * F32::kWidth * W::kBytes; ahead += 64) prefetch(next + ahead);
    next += kRows * F32::kWidth * W::kBytes;
    FT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const std::uint8_t* p = rows[r] + c * W::kBytes;
      const F32 wr = W::load(p);
      FT_UNROLL
      for (int t = 0; t < kTokens; ++t) sum[r][t] = fma(wr, xs[t], sum[r][t]);
    }
  }
  if (const int rest = static_cast<int>(w.cols - whole); rest != 0) {
    FT_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      const F32 xt = F32::load_partial(x[t] + whole, rest);
      FT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        sum[r][t] = fma(W::load_partial(rows[r] + whole * W::kBytes, rest), xt, sum[r][t]);
      }
    }
  }
  FT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    FT_UNROLL
    for (int t = 0; t < kTokens; ++t) y[t * y_stride + r] = hsum(sum[r][t]) * w.factor;
  }
}

#undef FT_UNROLL

template <class W, int kRows, int kTokens>
void float_dot_rows(const PackedMatrix& w, std::int64_t r0, std::int64_t r1, const float* const (&x)[kTokens],
                    float* y, std::int64_t y_stride) {
  std::int64_t r = r0;
  for (; r + kRows <= r1; r += kRows) {
    float_dot_block<W, kRows>(w, r, x, codes_ahead(w, r + kRows, r1), y + (r - r0), y_stride);
  }
  for (; r < r1; ++r) float_dot_block<W, 1>(w, r, x, codes_ahead(w, r + 1, r1), y + (r - r0), y_stride);
}

template <class W, int kTokens>
void float_dot_tokens(const PackedMatrix& w, std::int64_t r0, std::int64_t r1, const Activations& x,
                      const TokenRange& tokens, std::int64_t j, float* y, std::int64_t y_stride) {
  const float* rows[kTokens];
  for (int t = 0; t < kTokens; ++t) rows[t] = x.f32_row(tokens.row(j + t));
  float_dot_rows<W, kTokens == 1 ? 2 : 4, kTokens>(w, r0, r1, rows, y + j * y_stride, y_stride);
}

// A single token takes 2 rows at a time, so that they and the next two fit the first-level cache; with 3
// tokens, 12 accumulators, 3 activations
// and a weight fill the 16 registers of AVX2.
template <class W>
void float_dot(const PackedMatrix& w, std::int64_t r0, std::int64_t r1, const Activations& x,
               const TokenRange& tokens, float* y, std::int64_t y_stride) {
  std::int64_t j = 0;
  for (; tokens.count - j == 3 || tokens.count - j > 4; j += 3) {
    float_dot_tokens<W, 3>(w, r0, r1, x, tokens, j, y, y_stride);
  }
  for (; j + 2 <= tokens.count; j += 2) float_dot_tokens<W, 2>(w, r0, r1, x, tokens, j, y, y_stride);
  if (j < tokens.count) float_dot_tokens<W, 1>(w, r0, r1, x, tokens, j, y, y_stride);
}

template <class W>
void float_dequantize_row(const PackedMatrix& w, std::int64_t row, float* y) {
  const std::uint8_t* p = w.codes + row * w.code_row_stride;
  for (std::int64_t c = 0; c < w.cols; ++c) y[c] = W::to_f32(p + c * W::kBytes) * w.factor;
}

template <class W>
constexpr FormatKernels float_kernels() {
  return {.int8_activations = false, .dot = float_dot<W>, .dequantize_row = float_dequantize_row<W>};
}

}  // namespace ft::FT_ISA_NAMESPACE
