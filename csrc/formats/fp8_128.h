// FP8 e4m3 numbers, one byte each, with one float32 scale for 128 columns of 128 rows: value = w * scale.
// Activations in float32. As in float_dot.h, the additions of one (row, token) pair have one order,
// whatever the blocking: a vector per 128 columns, those times their scales in the order of the columns.
#pragma once

#include "formats/float_dot.h"

namespace ft::FT_ISA_NAMESPACE {

struct FP8_128 {
  static constexpr std::int64_t kBlock = 128;

  static float scale(const PackedMatrix& w, std::int64_t row, std::int64_t block) {
    float s;
    std::memcpy(&s, w.scales + row / kBlock * w.scale_row_stride + block * w.scale_block_stride, sizeof s);
    return s;
  }
  static void dequantize(const PackedMatrix& w, std::int64_t row, float* y) {
    const std::uint8_t* p = w.codes + row * w.code_row_stride;
    for (std::int64_t c = 0; c < w.cols; ++c) {
      y[c] = e4m3_to_f32(p[c]) * (scale(w, row, c / kBlock) * w.factor);
    }
  }
};

// As in float_dot.h.
#define FT_UNROLL _Pragma("GCC unroll 8")

// sum += the products of 4 * kWidth columns; kNormal: none of the numbers is below the normal ones.
template <bool kNormal, int kRows, int kTokens>
FT_INLINE void fp8_add_step(const std::uint8_t* const (&rows)[kRows],
                                                        const float* const (&x)[kTokens], std::int64_t c,
                                                        F32 (&sum)[kRows][kTokens]) {
  F32 w[kRows][4];
  FT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    if (kNormal) load_normal_e4m3(rows[r] + c, w[r]);
    else load_e4m3(rows[r] + c, w[r]);
  }
  FT_UNROLL
  for (int i = 0; i < 4; ++i) {
    FT_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      const F32 xt = load_spread(x[t] + c, i);
      FT_UNROLL
      for (int r = 0; r < kRows; ++r) sum[r][t] = fma(w[r][i], xt, sum[r][t]);
    }
  }
}

// The same for columns [first, end), a whole block of 128 or what is left of the row.
template <int kRows, int kTokens>
FT_INLINE void fp8_add_block(const std::uint8_t* const (&rows)[kRows],
                                                         const float* const (&x)[kTokens], std::int64_t first,
                                                         std::int64_t end, bool normal,
                                                         F32 (&sum)[kRows][kTokens]) {
  constexpr std::int64_t kStep = 4 * F32::kWidth;
  std::int64_t c = first;
  if (normal) {
    for (; c + kStep <= end; c += kStep) fp8_add_step<true>(rows, x, c, sum);
  } else {
    for (; c + kStep <= end; c += kStep) fp8_add_step<false>(rows, x, c, sum);
  }
  if (c == end) return;
  std::uint8_t w_rest[kRows][kStep] = {};
  float x_rest[kTokens][kStep] = {};
  const std::uint8_t* w_at[kRows];
  const float* x_at[kTokens];
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(w_rest[r], rows[r] + c, static_cast<std::size_t>(end - c));
    w_at[r] = w_rest[r];
  }
  for (int t = 0; t < kTokens; ++t) {
    std::memcpy(x_rest[t], x[t] + c, static_cast<std::size_t>(end - c) * sizeof(float));
    x_at[t] = x_rest[t];
  }
  fp8_add_step<false, kRows, kTokens>(w_at, x_at, 0, sum);
}

template <int kRows, int kTokens>
void fp8_dot_block(const PackedMatrix& w, std::int64_t row, const float* const (&x)[kTokens],
                   const std::uint8_t* next, float* y, std::int64_t y_stride) {
  const std::uint8_t* rows[kRows];
  F32 total[kRows][kTokens];
  E4m3Nans nans[kRows];   // told at the end: one NaN makes the whole sum NaN
  FT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    rows[r] = w.codes + (row + r) * w.code_row_stride;
    FT_UNROLL
    for (int t = 0; t < kTokens; ++t) total[r][t] = F32::zero();
  }
  for (std::int64_t first = 0; first < w.cols; first += FP8_128::kBlock) {
    const std::int64_t end = first + FP8_128::kBlock < w.cols ? first + FP8_128::kBlock : w.cols;
    F32 sum[kRows][kTokens];
    bool normal = true;
    for (std::int64_t ahead = 0; ahead < kRows * (end - first); ahead += 64) prefetch(next + ahead);
    next += kRows * (end - first);
    FT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      normal &= nans[r].note(rows[r] + first, end - first);
      FT_UNROLL
      for (int t = 0; t < kTokens; ++t) sum[r][t] = F32::zero();
    }
    fp8_add_block<kRows, kTokens>(rows, x, first, end, normal, sum);
    FT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const F32 scale = F32::broadcast(FP8_128::scale(w, row + r, first / FP8_128::kBlock));
      FT_UNROLL
      for (int t = 0; t < kTokens; ++t) total[r][t] = fma(sum[r][t], scale, total[r][t]);
    }
  }
  FT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float poison = nans[r].any() ? __builtin_nanf("") : 0.0f;
    FT_UNROLL
    for (int t = 0; t < kTokens; ++t) y[t * y_stride + r] = hsum(total[r][t]) * w.factor + poison;
  }
}

#undef FT_UNROLL

template <int kRows, int kTokens>
void fp8_dot_rows(const PackedMatrix& w, std::int64_t r0, std::int64_t r1, const float* const (&x)[kTokens],
                  float* y, std::int64_t y_stride) {
  std::int64_t r = r0;
  for (; r + kRows <= r1; r += kRows) {
    fp8_dot_block<kRows>(w, r, x, codes_ahead(w, r + kRows, r1), y + (r - r0), y_stride);
  }
  for (; r < r1; ++r) fp8_dot_block<1>(w, r, x, codes_ahead(w, r + 1, r1), y + (r - r0), y_stride);
}

inline void fp8_dot(const PackedMatrix& w, std::int64_t r0, std::int64_t r1, const Activations& x,
                    const TokenRange& tokens, float* y, std::int64_t y_stride) {
  std::int64_t j = 0;
  for (; j + 4 <= tokens.count; j += 4) {
    const float* const xs[4] = {x.f32_row(tokens.row(j)), x.f32_row(tokens.row(j + 1)),
                                x.f32_row(tokens.row(j + 2)), x.f32_row(tokens.row(j + 3))};
    fp8_dot_rows<2>(w, r0, r1, xs, y + j * y_stride, y_stride);
  }
  for (; j < tokens.count; ++j) {
    const float* const xs[1] = {x.f32_row(tokens.row(j))};
    fp8_dot_rows<4>(w, r0, r1, xs, y + j * y_stride, y_stride);
  }
}

inline void fp8_dequantize_row(const PackedMatrix& w, std::int64_t row, float* y) {
  FP8_128::dequantize(w, row, y);
}

constexpr FormatKernels fp8_kernels() {
  return {.dot = fp8_dot, .dequantize_row = fp8_dequantize_row};
}

}  // namespace ft::FT_ISA_NAMESPACE
