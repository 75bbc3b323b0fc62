// Dot products with rows of blocks of 32 codes, activations in int8. A format supplies
//   Product                        UnsignedNarrow or SignedWide: the range of its codes
//   kScales                        float scales of a block
//   Bytes32 codes(p)               the 32 codes of a block, one per byte
//   scales(p, stride, s)           lane r of s[i]: scale i of the block at p + r * stride
//   add_block(sum, s, dot, x_scale, x_sum)   sum + the block's part of w . x; `dot` is the exact
//                                  integer product, x ~ x_scale * q, x_sum the sum of the block's q
//   dequantize(codes, scales, y)   the 32 numbers
//
// A lane is a row. The integer product of a block is exact, and floats are only added block by block
// in the order of the columns with one accumulator per (row, token): the result is the same, bit for
// bit, on every instruction set, for every blocking and for any number of tokens. (Multiplications and
// additions must stay separate: compile with -ffp-contract=off.)
#pragma once

#include "ops/kernel_set.h"
#include "simd/simd.h"

namespace ft::FT_ISA_NAMESPACE {

// kWidth neighbouring rows of a matrix, of which the lanes [first, first + count) are asked for.
struct RowGroup {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t code_stride, scale_stride;   // from lane to lane
  int first, count;
};

// The group that begins with row r. Near the end it reaches back, so that no lane reads outside; a
// matrix with fewer rows than lanes goes row by row, all lanes on the same one.
inline RowGroup row_group(const PackedMatrix& w, std::int64_t r, std::int64_t r1) {
  const bool wide = w.rows >= F32::kWidth;
  const std::int64_t start = wide && r > w.rows - F32::kWidth ? w.rows - F32::kWidth : r;
  const std::int64_t lanes = wide ? F32::kWidth - (r - start) : 1;
  return {
      .codes = w.codes + start * w.code_row_stride,
      .scales = w.scales + start * w.scale_row_stride,
      .code_stride = wide ? w.code_row_stride : 0,
      .scale_stride = wide ? w.scale_row_stride : 0,
      .first = static_cast<int>(r - start),
      .count = static_cast<int>(r1 - r < lanes ? r1 - r : lanes),
  };
}

inline void store_lanes(F32 v, const RowGroup& g, float* y) {
  if (g.count == F32::kWidth) return v.store(y);
  float lanes[F32::kWidth];
  v.store(lanes);
  for (int i = 0; i < g.count; ++i) y[i] = lanes[g.first + i];
}

inline F32 load_lanes(const RowGroup& g, const float* y) {
  if (g.count == F32::kWidth) return F32::load(y);
  float lanes[F32::kWidth] = {};
  for (int i = 0; i < g.count; ++i) lanes[g.first + i] = y[i];
  return F32::load(lanes);
}

// The activations of one token.
struct QuantizedToken {
  const std::int8_t* q;
  const float* d;
  const std::int32_t* sum;
};

inline QuantizedToken quantized_token(const Activations& x, std::int64_t token) {
  const std::int64_t blocks = x.cols / 32;
  return {x.q + token * x.cols, x.d + token * blocks, x.sum + token * blocks};
}

// One token: straight from memory, while the rows of the next group are fetched in the order in which
// they lie there (8 short streams become one long one).
template <class W>
F32 dot_one(const PackedMatrix& w, const RowGroup& g, const QuantizedToken& x) {
  constexpr int kRows = F32::kWidth;
  const std::int64_t blocks = w.cols / 32;
  const std::uint8_t* codes = g.codes;
  const std::uint8_t* scales = g.scales;
  const std::uint8_t* next = g.codes + kRows * g.code_stride;
  const std::int64_t next_step = kRows * w.code_block_stride;
  F32 sum = F32::zero();
  for (std::int64_t b = 0; b < blocks; ++b) {
    for (std::int64_t ahead = 0; ahead < next_step; ahead += 64) prefetch(next + ahead);
    next += next_step;
    const Bytes32 xb = Bytes32::load(x.q + b * 32);
    I32 partial[kRows];
    for (int r = 0; r < kRows; ++r) {
      partial[r] = W::Product::dot(W::codes(codes + r * g.code_stride), xb);
    }
    F32 s[W::kScales];
    W::scales(scales, g.scale_stride, s);
    sum = W::add_block(sum, s, W::Product::sum_rows(partial), x.d[b], x.sum[b]);
    codes += w.code_block_stride;
    scales += w.scale_block_stride;
  }
  return sum;
}

// Several tokens: up to kPanelBlocks blocks of a group are unpacked once, to a panel that stays in the
// first-level cache while all tokens pass over it.
inline constexpr int kPanelBlocks = 64;

template <class W>
struct Panel {
  std::uint8_t codes[kPanelBlocks * kPanelBytes];
  float scales[kPanelBlocks * W::kScales * F32::kWidth];

  void unpack(const PackedMatrix& w, const RowGroup& g, std::int64_t first_block, int blocks) {
    const std::uint8_t* from = g.codes + first_block * w.code_block_stride;
    const std::uint8_t* scale = g.scales + first_block * w.scale_block_stride;
    for (int b = 0; b < blocks; ++b) {
      Bytes32 rows[F32::kWidth];
      for (int r = 0; r < F32::kWidth; ++r) rows[r] = W::codes(from + r * g.code_stride);
      store_panel(rows, codes + b * kPanelBytes);
      F32 s[W::kScales];
      W::scales(scale, g.scale_stride, s);
      for (int i = 0; i < W::kScales; ++i) s[i].store(scales + (b * W::kScales + i) * F32::kWidth);
      from += w.code_block_stride;
      scale += w.scale_block_stride;
    }
  }

  template <int T>
  void add(int blocks, std::int64_t first_block, const QuantizedToken (&x)[T], F32 (&sum)[T]) const {
    for (int b = 0; b < blocks; ++b) {
      const std::int8_t* q[T];
      for (int t = 0; t < T; ++t) q[t] = x[t].q + (first_block + b) * 32;
      I32 dot[T];
      W::Product::panel_dot(codes + b * kPanelBytes, q, dot);
      F32 s[W::kScales];
      for (int i = 0; i < W::kScales; ++i) s[i] = F32::load(scales + (b * W::kScales + i) * F32::kWidth);
      for (int t = 0; t < T; ++t) {
        sum[t] = W::add_block(sum[t], s, dot[t], x[t].d[first_block + b], x[t].sum[first_block + b]);
      }
    }
  }

  template <int T>
  void add_tokens(const RowGroup& g, int blocks, std::int64_t first_block, const Activations& x,
                  const TokenRange& tokens, std::int64_t j, float* y, std::int64_t y_stride) const {
    QuantizedToken token[T];
    F32 sum[T];
    for (int t = 0; t < T; ++t) {
      token[t] = quantized_token(x, tokens.row(j + t));
      sum[t] = first_block == 0 ? F32::zero() : load_lanes(g, y + (j + t) * y_stride);
    }
    add(blocks, first_block, token, sum);
    for (int t = 0; t < T; ++t) store_lanes(sum[t], g, y + (j + t) * y_stride);
  }
};

template <class W>
void dot_many(const PackedMatrix& w, const RowGroup& g, const Activations& x, const TokenRange& tokens,
              float* y, std::int64_t y_stride) {
  alignas(64) Panel<W> panel;
  const std::int64_t all_blocks = w.cols / 32;
  for (std::int64_t first = 0; first < all_blocks; first += kPanelBlocks) {
    const std::int64_t left = all_blocks - first;
    const int blocks = static_cast<int>(left < kPanelBlocks ? left : kPanelBlocks);
    panel.unpack(w, g, first, blocks);
    std::int64_t j = 0;
    for (; j + 4 <= tokens.count; j += 4) {
      panel.template add_tokens<4>(g, blocks, first, x, tokens, j, y, y_stride);
    }
    for (; j < tokens.count; ++j) panel.template add_tokens<1>(g, blocks, first, x, tokens, j, y, y_stride);
  }
}

template <class W>
void quantized_dot(const PackedMatrix& w, std::int64_t r0, std::int64_t r1, const Activations& x,
                   const TokenRange& tokens, float* y, std::int64_t y_stride) {
  for (std::int64_t r = r0; r < r1;) {
    const RowGroup g = row_group(w, r, r1);
    float* out = y + (r - r0);
    if (tokens.count == 1) {
      store_lanes(dot_one<W>(w, g, quantized_token(x, tokens.row(0))), g, out);
    } else {
      dot_many<W>(w, g, x, tokens, out, y_stride);
    }
    r += g.count;
  }
}

template <class W>
void quantized_dequantize_row(const PackedMatrix& w, std::int64_t row, float* y) {
  const std::uint8_t* codes = w.codes + row * w.code_row_stride;
  const std::uint8_t* scales = w.scales + row * w.scale_row_stride;
  for (std::int64_t b = 0; b < w.cols / 32; ++b) {
    W::dequantize(codes + b * w.code_block_stride, scales + b * w.scale_block_stride, y + b * 32);
  }
}

template <class W>
constexpr FormatKernels quantized_kernels() {
  return {.int8_activations = true, .dot = quantized_dot<W>, .dequantize_row = quantized_dequantize_row<W>};
}

}  // namespace ft::FT_ISA_NAMESPACE
