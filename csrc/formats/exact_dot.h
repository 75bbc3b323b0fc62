// Dot products of quantised rows with float32 activations: a few rows at a time are brought to float32, a
// stretch that stays in the first-level cache, and multiplied as plain floats are. The sums of the
// stretches are added in the order of the columns.
#pragma once

#include "formats/f32.h"
#include "formats/quantized_dot.h"

namespace ft::FT_ISA_NAMESPACE {

template <class W>
void dequantize_steps(const PackedMatrix& w, std::int64_t row, std::int64_t first, std::int64_t n, float* y) {
  const Steps<W> step(w);
  const std::uint8_t* codes = w.codes + row * w.code_row_stride;
  const std::uint8_t* scales = w.scales + row * w.scale_row_stride;
  for (std::int64_t b = first / W::kColumns; b < (first + n) / W::kColumns; ++b, y += W::kColumns) {
    W::dequantize(codes + b * step.codes, scales + b * step.scales, y);
  }
}

template <class W>
void exact_dot(const PackedMatrix& w, std::int64_t r0, std::int64_t r1, const Activations& x,
               const TokenRange& tokens, float* y, std::int64_t y_stride) {
  constexpr std::int64_t kRows = 4;
  constexpr std::int64_t kColumns = 512;   // whole steps of every format
  constexpr std::int64_t kTokens = 64;
  static_assert(kColumns % W::kColumns == 0);
  alignas(64) float tile[kRows * kColumns];
  alignas(64) float sums[kTokens * kRows];
  const auto at_most = [](std::int64_t limit, std::int64_t left) { return left < limit ? left : limit; };
  for (std::int64_t r = r0; r < r1; r += kRows) {
    const std::int64_t rows = at_most(kRows, r1 - r);
    for (std::int64_t c = 0; c < w.cols; c += kColumns) {
      const std::int64_t cols = at_most(kColumns, w.cols - c);
      const float factor = c + cols == w.cols ? w.factor : 1.0f;
      for (std::int64_t i = 0; i < rows; ++i) dequantize_steps<W>(w, r + i, c, cols, tile + i * kColumns);
      const PackedMatrix stretch = {
          .format = Format::F32,
          .rows = rows,
          .cols = cols,
          .codes = reinterpret_cast<const std::uint8_t*>(tile),
          .scales = nullptr,
          .code_row_stride = kColumns * static_cast<std::int64_t>(sizeof(float)),
          .code_block_stride = sizeof(float),
          .scale_row_stride = 0,
          .scale_block_stride = 0,
      };
      const Activations columns = {.cols = x.cols, .f32 = x.f32 + c, .q = nullptr, .d = nullptr, .sum = nullptr};
      for (std::int64_t j = 0; j < tokens.count; j += kTokens) {
        const TokenRange some = {tokens.list == nullptr ? nullptr : tokens.list + j, tokens.first + j,
                                 at_most(kTokens, tokens.count - j)};
        float_dot<F32Weights>(stretch, 0, rows, columns, some, sums, kRows);
        for (std::int64_t t = 0; t < some.count; ++t) {
          float* out = y + (j + t) * y_stride + (r - r0);
          for (std::int64_t i = 0; i < rows; ++i) {
            out[i] = ((c == 0 ? 0.0f : out[i]) + sums[t * kRows + i]) * factor;
          }
        }
      }
    }
  }
}

template <class W>
constexpr FormatKernels exact_kernels() {
  return {.dot = exact_dot<W>, .dequantize_row = quantized_dequantize_row<W>};
}

}  // namespace ft::FT_ISA_NAMESPACE
