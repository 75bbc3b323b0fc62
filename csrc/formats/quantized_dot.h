// Dot products with rows of blocks of codes, activations in int8. A format supplies
//   kColumns                       columns of a step, a multiple of 32: a stored block, or several
//   Product                        Unsigned<n, zero> or Signed: the range of its codes, and the one that means zero
//   Codes                          Nibbles<Order> or WholeBytes, see there: how the codes lie
//   kParts                         1, or 2 if columns 0..15 and 16..31 have scales of their own
//   kScales                        float scales of 32 columns
//   Bytes32 decode(nibbles)        codes of nibbles, if they are Nibbles; else
//   Bytes32 codes(p, i)            the codes of columns 32 i .. 32 i + 31 of a step, one per byte
//   scales(p, stride, s)           lane r of s[kScales * i + k]: scale k of those columns, for the row
//                                  whose scales are at p + r * stride
//   add_block(sum, s, dot, x)      sum + the part of w . x of 32 columns with the scales s[0 .. kScales - 1];
//                                  dot[k] is the exact integer product of part k, of codes less that of zero
//   dequantize(codes, scales, y)   the numbers of a step
//
// A lane is a row. The integer products of 32 columns are exact, and floats are only added per 32 columns
// in their order with one accumulator per (row, token): the result is the same, bit for bit, on every
// instruction set, for every blocking and for any number of tokens. (Multiplications and additions must
// stay separate: compile with -ffp-contract=off.)
#pragma once

#include "ops/kernel_set.h"
#include "simd/simd.h"

namespace ft::FT_ISA_NAMESPACE {

// The columns of 32 nibbles in 16 bytes. Activations are brought into the order of the nibbles (the low ones,
// then the high ones), once for kWidth rows; `restore` is the way back. Panels hold codes in the order of the columns: group i of the
// low nibbles, and of the high ones, is that group of columns; if they are interleaved, byte j holds columns
// 2j and 2j + 1.
struct InOrder {
  static constexpr bool kInterleaved = false;
  static constexpr int low_group(int i) { return i; }
  static constexpr int high_group(int i) { return i + 4; }
  static Bytes32 arrange(Bytes32 x) { return x; }
  static Bytes32 restore(Bytes32 codes) { return codes; }
};

struct QuartersSwapped {   // low nibbles: columns 0..7 and 16..23
  static constexpr bool kInterleaved = false;
  static constexpr int low_group(int i) { return i < 2 ? i : i + 2; }
  static constexpr int high_group(int i) { return low_group(i) + 2; }
  static Bytes32 arrange(Bytes32 x) { return x.swap_quarters(); }
  static Bytes32 restore(Bytes32 codes) { return codes.swap_quarters(); }
};

struct EvensFirst {   // low nibbles: even columns
  static constexpr bool kInterleaved = true;
  static constexpr int low_group(int i) { return i; }
  static constexpr int high_group(int i) { return i; }
  static Bytes32 arrange(Bytes32 x) { return x.evens_first(); }
  static Bytes32 restore(Bytes32 codes) { return codes.interleave_halves(); }
};

// Codes in nibbles, 16 bytes for 32 columns.
template <class NibbleOrder>
struct Nibbles {
  using Order = NibbleOrder;
  template <class W>
  static void dot(const std::uint8_t* p, std::int64_t stride, int i, Bytes32 x, I32 (&dot)[W::kParts]) {
    Sums<typename W::Product>::template nibbles<W>(p + 16 * i, stride, Order::arrange(x), dot);
  }
  template <class W>
  static void store(const std::uint8_t* p, std::int64_t stride, int i, std::uint8_t* codes) {
    store_nibble_panel<W>(p + 16 * i, stride, codes);
  }
};

// Codes as the format's `codes` gives them, in the order of the columns.
struct WholeBytes {
  template <class W>
  static void dot(const std::uint8_t* p, std::int64_t stride, int i, Bytes32 x, I32 (&dot)[W::kParts]) {
    Partial partial[F32::kWidth];
#pragma GCC unroll 16
    for (int r = 0; r < F32::kWidth; ++r) partial[r] = W::Product::dot(W::codes(p + r * stride, i), x);
    sum<typename W::Product>(partial, dot);
  }
  template <class W>
  static void store(const std::uint8_t* p, std::int64_t stride, int i, std::uint8_t* codes) {
    Bytes32 rows[F32::kWidth];
#pragma GCC unroll 16
    for (int r = 0; r < F32::kWidth; ++r) rows[r] = W::codes(p + r * stride, i);
    store_panel(rows, codes);
  }

 private:
  template <class Product>
  static void sum(const Partial (&p)[F32::kWidth], I32 (&dot)[1]) { Sums<Product>::whole(p, dot); }
  template <class Product>
  static void sum(const Partial (&p)[F32::kWidth], I32 (&dot)[2]) { Sums<Product>::halves(p, dot); }
};

// kWidth neighbouring rows of a matrix, of which the lanes [first, first + count) are asked for.
struct RowGroup {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t code_stride, scale_stride;   // from lane to lane
  int first, count;
  const std::uint8_t* next;   // codes to fetch meanwhile: of the next group, or what is read after the last
};

// The group that begins with row r. Near the end it reaches back, so that no lane reads outside; a
// matrix with fewer rows than lanes goes row by row, all lanes on the same one.
inline RowGroup row_group(const PackedMatrix& w, std::int64_t r, std::int64_t r1) {
  const bool wide = w.rows >= F32::kWidth;
  const std::int64_t start = wide && r > w.rows - F32::kWidth ? w.rows - F32::kWidth : r;
  const std::int64_t lanes = wide ? F32::kWidth - (r - start) : 1;
  const std::uint8_t* following = w.codes + (start + (wide ? F32::kWidth : 1)) * w.code_row_stride;
  const bool last = r1 - r <= lanes;
  return {
      .codes = w.codes + start * w.code_row_stride,
      .scales = w.scales + start * w.scale_row_stride,
      .code_stride = wide ? w.code_row_stride : 0,
      .scale_stride = wide ? w.scale_row_stride : 0,
      .first = static_cast<int>(r - start),
      .count = static_cast<int>(last ? r1 - r : lanes),
      .next = last && w.codes_after != nullptr ? w.codes_after : following,
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

// 32 columns of a token: x ~ d * q, and the sums of the q of columns 0..15 and of 16..31.
struct TokenBlock {
  float d;
  const std::int32_t* half_sum;

  std::int32_t sum() const { return half_sum[0] + half_sum[1]; }
};

// The activations of one token.
struct QuantizedToken {
  const std::int8_t* q;
  const float* d;
  const std::int32_t* sum;
  const std::uint8_t* raised;

  TokenBlock block(std::int64_t b) const { return {d[b], sum + 2 * b}; }
  PanelToken panel(std::int64_t b) const { return {q + 32 * b, raised + 32 * b}; }
};

inline QuantizedToken quantized_token(const Activations& x, std::int64_t token) {
  return {x.q + token * x.cols, x.d + token * (x.cols / 32), x.sum + token * (x.cols / 16),
          x.raised + token * x.cols};
}

// What products of codes are more than those of codes less that of zero.
template <class W>
void take_off_zero(I32 (&dot)[W::kParts], const TokenBlock& x) {
  if constexpr (W::Product::kZero != 0) {
    for (int i = 0; i < W::kParts; ++i) {
      const std::int32_t sum = W::kParts == 1 ? x.sum() : x.half_sum[i];
      dot[i] = dot[i] - I32::broadcast(W::Product::kZero * sum);
    }
  }
}

// How far a step is from the next, in codes and in scales.
template <class W>
struct Steps {
  static constexpr int kBlocks = W::kColumns / 32;   // of 32 columns
  std::int64_t codes, scales;

  explicit Steps(const PackedMatrix& w) {
    const std::int64_t stored = W::kColumns / format_info(w.format).block_elements;
    codes = stored * w.code_block_stride;
    scales = stored * w.scale_block_stride;
  }
};

// Fetches a stretch line by line, as evenly as the work that it accompanies: a burst would fill the core's
// few slots for misses and leave memory idle afterwards.
class Fetch {
 public:
  explicit Fetch(const std::uint8_t* from) : line_(from), end_(from) {}
  void advance(std::int64_t bytes) {
    for (end_ += bytes; line_ < end_; line_ += 64) prefetch(line_);
  }

 private:
  const std::uint8_t *line_, *end_;
};

// One token: straight from memory, while the rows of the next group are fetched in the order in which
// they lie there (8 short streams become one long one).
template <class W>
F32 dot_one(const PackedMatrix& w, const RowGroup& g, const QuantizedToken& x) {
  constexpr int kRows = F32::kWidth;
  constexpr int kBlocks = Steps<W>::kBlocks;
  const Steps<W> step(w);
  const std::uint8_t* codes = g.codes;
  const std::uint8_t* scales = g.scales;
  Fetch next(g.next);
  F32 sum = F32::zero();
  for (std::int64_t b = 0; b < w.cols / 32; b += kBlocks) {
    F32 s[kBlocks * W::kScales];
    W::scales(scales, g.scale_stride, s);
#pragma GCC unroll 8
    for (int i = 0; i < kBlocks; ++i) {
      next.advance(kRows * step.codes / kBlocks);
      I32 dot[W::kParts];
      W::Codes::template dot<W>(codes, g.code_stride, i, Bytes32::load(x.q + (b + i) * 32), dot);
      take_off_zero<W>(dot, x.block(b + i));
      sum = W::add_block(sum, s + i * W::kScales, dot, x.block(b + i));
    }
    codes += step.codes;
    scales += step.scales;
  }
  return sum * F32::broadcast(w.factor);
}

// Fewer than kPanelTokens tokens go one by one: all but the first find the group in the first-level cache.
// For more, some 32 columns of one or two groups are unpacked once, to panels that stay in the
// first-level cache while all tokens pass over them.
inline constexpr int kPanelTokens = 4;

template <class W, int kGroups>
class Panels {
 public:
  static constexpr int kBlocks = 64 / kGroups;   // most: 16 KiB of codes

  void unpack(const PackedMatrix& w, const RowGroup (&groups)[kGroups], std::int64_t first_block, int blocks) {
    for (int r = 0; r < kGroups; ++r) unpack(w, groups[r], first_block, blocks, panels_[r]);
  }

  template <int kTokens>
  void add(const RowGroup (&groups)[kGroups], int blocks, std::int64_t first_block, float factor,
           const Activations& x, const TokenRange& tokens, std::int64_t j, float* y, std::int64_t y_stride) const {
    QuantizedToken token[kTokens];
    F32 sum[kTokens][kGroups];
    for (int t = 0; t < kTokens; ++t) {
      token[t] = quantized_token(x, tokens.row(j + t));
      for (int r = 0; r < kGroups; ++r) {
        const float* at = y + (j + t) * y_stride + r * F32::kWidth;
        sum[t][r] = first_block == 0 ? F32::zero() : load_lanes(groups[r], at);
      }
    }
    add_blocks(blocks, first_block, token, sum);
    for (int t = 0; t < kTokens; ++t) {
      for (int r = 0; r < kGroups; ++r) {
        store_lanes(sum[t][r] * F32::broadcast(factor), groups[r], y + (j + t) * y_stride + r * F32::kWidth);
      }
    }
  }

 private:
  using Block = PanelBlock<typename W::Product, W::kParts>;
  struct Panel {
    Block blocks[kBlocks];
    alignas(64) float scales[kBlocks * W::kScales * F32::kWidth];
  };

  static void unpack(const PackedMatrix& w, const RowGroup& g, std::int64_t first_block, int blocks, Panel& to) {
    constexpr int kStep = Steps<W>::kBlocks;
    static_assert(kBlocks % kStep == 0);
    const Steps<W> step(w);
    const std::uint8_t* from = g.codes + first_block / kStep * step.codes;
    const std::uint8_t* scale = g.scales + first_block / kStep * step.scales;
    const std::uint8_t* next = g.next + F32::kWidth * (first_block / kStep * step.codes);
    for (int b = 0; b < blocks; b += kStep) {
      for (std::int64_t ahead = 0; ahead < F32::kWidth * step.codes; ahead += 64) prefetch(next + ahead);
      next += F32::kWidth * step.codes;
#pragma GCC unroll 8
      for (int i = 0; i < kStep; ++i) {
        W::Codes::template store<W>(from, g.code_stride, i, to.blocks[b + i].codes);
        to.blocks[b + i].finish();
      }
      F32 s[kStep * W::kScales];
      W::scales(scale, g.scale_stride, s);
      for (int i = 0; i < kStep * W::kScales; ++i) s[i].store(to.scales + (b * W::kScales + i) * F32::kWidth);
      from += step.codes;
      scale += step.scales;
    }
  }

  template <int kTokens>
  FT_INLINE void add_blocks(int blocks, std::int64_t first_block, const QuantizedToken (&x)[kTokens],
                  F32 (&sum)[kTokens][kGroups]) const {
    for (int b = 0; b < blocks; ++b) {
      const Block* block[kGroups];
      F32 s[kGroups][W::kScales];
#pragma GCC unroll 2
      for (int r = 0; r < kGroups; ++r) {
        block[r] = panels_[r].blocks + b;
        for (int i = 0; i < W::kScales; ++i) {
          s[r][i] = F32::load(panels_[r].scales + (b * W::kScales + i) * F32::kWidth);
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        I32 dot[kGroups][W::kParts];
        panel_dot<typename W::Product, W::kParts>(block, x[t].panel(first_block + b), dot);
#pragma GCC unroll 2
        for (int r = 0; r < kGroups; ++r) sum[t][r] = W::add_block(sum[t][r], s[r], dot[r], x[t].block(first_block + b));
      }
    }
  }

  Panel panels_[kGroups];
};

template <class W, int kGroups>
void dot_many(const PackedMatrix& w, const RowGroup (&groups)[kGroups], const Activations& x,
              const TokenRange& tokens, float* y, std::int64_t y_stride) {
  using Panels = Panels<W, kGroups>;
  Panels panels;
  const std::int64_t all_blocks = w.cols / 32;
  for (std::int64_t first = 0; first < all_blocks; first += Panels::kBlocks) {
    const std::int64_t left = all_blocks - first;
    const int blocks = static_cast<int>(left < Panels::kBlocks ? left : Panels::kBlocks);
    const float factor = blocks == left ? w.factor : 1.0f;   // after the last panel
    panels.unpack(w, groups, first, blocks);
    std::int64_t j = 0;
    for (; j + 4 <= tokens.count; j += 4) {
      panels.template add<4>(groups, blocks, first, factor, x, tokens, j, y, y_stride);
    }
    for (; j < tokens.count; ++j) {
      panels.template add<1>(groups, blocks, first, factor, x, tokens, j, y, y_stride);
    }
  }
}

template <class W>
void quantized_dot(const PackedMatrix& w, std::int64_t r0, std::int64_t r1, const Activations& x,
                   const TokenRange& tokens, float* y, std::int64_t y_stride) {
  constexpr int kGroups = W::Product::kPanelGroups;
  for (std::int64_t r = r0; r < r1;) {
    const RowGroup g = row_group(w, r, r1);
    float* out = y + (r - r0);
    if (tokens.count < kPanelTokens) {
      for (std::int64_t j = 0; j < tokens.count; ++j) {
        store_lanes(dot_one<W>(w, g, quantized_token(x, tokens.row(j))), g, out + j * y_stride);
      }
    } else {
      if constexpr (kGroups == 2) {
        if (r1 - r >= 2 * F32::kWidth) {
          dot_many<W, 2>(w, {g, row_group(w, r + F32::kWidth, r1)}, x, tokens, out, y_stride);
          r += 2 * F32::kWidth;
          continue;
        }
      }
      dot_many<W, 1>(w, {g}, x, tokens, out, y_stride);
    }
    r += g.count;
  }
}

// The same numbers in larger steps, for rows that are whole steps of them.
template <class Wide, class W>
void quantized_dot_wide(const PackedMatrix& w, std::int64_t r0, std::int64_t r1, const Activations& x,
                        const TokenRange& tokens, float* y, std::int64_t y_stride) {
  const auto dot = w.cols % Wide::kColumns == 0 ? quantized_dot<Wide> : quantized_dot<W>;
  dot(w, r0, r1, x, tokens, y, y_stride);
}

template <class W>
void quantized_dequantize_row(const PackedMatrix& w, std::int64_t row, float* y) {
  const Steps<W> step(w);
  const std::uint8_t* codes = w.codes + row * w.code_row_stride;
  const std::uint8_t* scales = w.scales + row * w.scale_row_stride;
  for (std::int64_t b = 0; b < w.cols / W::kColumns; ++b) {
    W::dequantize(codes + b * step.codes, scales + b * step.scales, y + b * W::kColumns);
  }
  for (std::int64_t c = 0; c < w.cols; ++c) y[c] *= w.factor;
}

template <class W>
constexpr FormatKernels quantized_kernels() {
  return {.int8_activations = true, .dot = quantized_dot<W>, .dequantize_row = quantized_dequantize_row<W>};
}

}  // namespace ft::FT_ISA_NAMESPACE
