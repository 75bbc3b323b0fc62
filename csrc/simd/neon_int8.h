// Products of codes with int8 activations, with NEON's dot products. Their meaning: simd/scalar_int8.h.
#pragma once

#include "simd/neon.h"

namespace ft::isa_neon {

struct Bytes32 {
  uint8x16_t low, high;

  static Bytes32 load(const void* p) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);
    return {vld1q_u8(bytes), vld1q_u8(bytes + 16)};
  }
  void store(std::uint8_t* p) const {
    vst1q_u8(p, low);
    vst1q_u8(p + 16, high);
  }
  static Bytes32 nibbles(uint8x16_t bytes) {
    return {vandq_u8(bytes, vdupq_n_u8(0x0f)), vshrq_n_u8(bytes, 4)};
  }
  static Bytes32 load_nibbles(const std::uint8_t* p) { return nibbles(vld1q_u8(p)); }
  static Bytes32 lookup(const std::uint8_t (&table)[16], Bytes32 index) {
    const uint8x16_t entries = vld1q_u8(table);
    return {vqtbl1q_u8(entries, index.low), vqtbl1q_u8(entries, index.high)};
  }
  Bytes32 bits(int up, int mask) const {
    const int8x16_t places = vdupq_n_s8(static_cast<std::int8_t>(up));
    const uint8x16_t kept = vdupq_n_u8(static_cast<std::uint8_t>(mask));
    return {vandq_u8(vshlq_u8(low, places), kept), vandq_u8(vshlq_u8(high, places), kept)};
  }
  Bytes32 swap_quarters() const {
    const uint64x2_t a = vreinterpretq_u64_u8(low), b = vreinterpretq_u64_u8(high);
    return {vreinterpretq_u8_u64(vzip1q_u64(a, b)), vreinterpretq_u8_u64(vzip2q_u64(a, b))};
  }
  Bytes32 evens_first() const { return {vuzp1q_u8(low, high), vuzp2q_u8(low, high)}; }
  Bytes32 interleave_halves() const { return {vzip1q_u8(low, high), vzip2q_u8(low, high)}; }
};

inline Bytes32 operator|(Bytes32 a, Bytes32 b) { return {vorrq_u8(a.low, b.low), vorrq_u8(a.high, b.high)}; }

inline void store_panel(const Bytes32 (&rows)[4], std::uint8_t* panel) {
  uint32x4_t low[4], high[4], group[4];
  for (int r = 0; r < 4; ++r) {
    low[r] = vreinterpretq_u32_u8(rows[r].low);
    high[r] = vreinterpretq_u32_u8(rows[r].high);
  }
  transpose(low, group);
  for (int g = 0; g < 4; ++g) vst1q_u8(panel + 16 * g, vreinterpretq_u8_u32(group[g]));
  transpose(high, group);
  for (int g = 0; g < 4; ++g) vst1q_u8(panel + 16 * (g + 4), vreinterpretq_u8_u32(group[g]));
}

// Four bytes of each row hold eight codes: two groups.
template <class W>
void store_nibble_panel(const std::uint8_t* p, std::int64_t stride, std::uint8_t* panel) {
  using Order = typename W::Codes::Order;
  I32 word[4];
  gather_words(p, stride, word);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Bytes32 codes = W::decode(Bytes32::nibbles(vreinterpretq_u8_s32(word[i].v)));
    if constexpr (Order::kInterleaved) {   // two words of each row, row by row
      const Bytes32 pairs = codes.interleave_halves();
      const uint32x4_t a = vreinterpretq_u32_u8(pairs.low), b = vreinterpretq_u32_u8(pairs.high);
      vst1q_u8(panel + 32 * i, vreinterpretq_u8_u32(vuzp1q_u32(a, b)));
      vst1q_u8(panel + 32 * i + 16, vreinterpretq_u8_u32(vuzp2q_u32(a, b)));
    } else {
      vst1q_u8(panel + 16 * Order::low_group(i), codes.low);
      vst1q_u8(panel + 16 * Order::high_group(i), codes.high);
    }
  }
}

// sum + the products of four neighbouring bytes, lane by lane.
inline int32x4_t add_products(int32x4_t sum, uint8x16_t w, uint8x16_t x) {
  return vdotq_s32(sum, vreinterpretq_s8_u8(w), vreinterpretq_s8_u8(x));
}

struct Partial {   // columns 0..15 and 16..31
  int32x4_t low, high;
};

template <class Product>
struct Sums {
  // Lane r: the sum of the lanes of p[r].
  static int32x4_t add_lanes(const int32x4_t (&p)[4]) {
    return vpaddq_s32(vpaddq_s32(p[0], p[1]), vpaddq_s32(p[2], p[3]));
  }
  static void whole(const Partial (&p)[4], I32 (&out)[1]) {
    int32x4_t sums[4];
    for (int r = 0; r < 4; ++r) sums[r] = vaddq_s32(p[r].low, p[r].high);
    out[0].v = add_lanes(sums);
  }
  static void halves(const Partial (&p)[4], I32 (&out)[2]) {
    out[0].v = add_lanes({p[0].low, p[1].low, p[2].low, p[3].low});
    out[1].v = add_lanes({p[0].high, p[1].high, p[2].high, p[3].high});
  }
  // Lane i of rows[r]: bytes 4i .. 4i + 3 of row r, both nibbles.
  template <class W>
  static void nibbles(const std::uint8_t* p, std::int64_t stride, Bytes32 x, int32x4_t (&rows)[4]) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const Bytes32 codes = W::decode(Bytes32::load_nibbles(p + r * stride));
      rows[r] = add_products(add_products(vdupq_n_s32(0), codes.low, x.low), codes.high, x.high);
    }
  }
  template <class W>
  static void nibbles(const std::uint8_t* p, std::int64_t stride, Bytes32 x, I32 (&out)[1]) {
    int32x4_t rows[4];
    nibbles<W>(p, stride, x, rows);
    out[0].v = add_lanes(rows);
  }
  template <class W>
  static void nibbles(const std::uint8_t* p, std::int64_t stride, Bytes32 x, I32 (&out)[2]) {
    int32x4_t rows[4];
    nibbles<W>(p, stride, x, rows);
    const int32x4_t a = vpaddq_s32(rows[0], rows[1]), b = vpaddq_s32(rows[2], rows[3]);
    out[0].v = vuzp1q_s32(a, b);
    out[1].v = vuzp2q_s32(a, b);
  }
};

template <class Product, int kParts>
struct PanelBlock {
  alignas(16) std::uint8_t codes[128];

  void finish() {
    if constexpr (Product::kZero != 0) {
      for (int g = 0; g < 8; ++g) {
        vst1q_u8(codes + 16 * g, vsubq_u8(vld1q_u8(codes + 16 * g), vdupq_n_u8(Product::kZero)));
      }
    }
  }
  int8x16_t group(int g) const { return vreinterpretq_s8_u8(vld1q_u8(codes + 16 * g)); }
};

struct PanelToken {
  const std::int8_t* q;
  const std::uint8_t* raised;
};

template <class Block>
int32x4_t half_panel(const Block& w, int g, int8x16_t x) {   // groups g .. g + 3
  int32x4_t sum = vdotq_laneq_s32(vdupq_n_s32(0), w.group(g), x, 0);
  sum = vdotq_laneq_s32(sum, w.group(g + 1), x, 1);
  sum = vdotq_laneq_s32(sum, w.group(g + 2), x, 2);
  return vdotq_laneq_s32(sum, w.group(g + 3), x, 3);
}

template <class Product, int kParts, int kGroups>
FT_INLINE void panel_dot(const PanelBlock<Product, kParts>* const (&blocks)[kGroups], const PanelToken& x,
               I32 (&out)[kGroups][kParts]) {
  const int8x16_t low = vld1q_s8(x.q), high = vld1q_s8(x.q + 16);
#pragma GCC unroll 2
  for (int r = 0; r < kGroups; ++r) {
    const int32x4_t first = half_panel(*blocks[r], 0, low), second = half_panel(*blocks[r], 4, high);
    if constexpr (kParts == 1) {
      out[r][0].v = vaddq_s32(first, second);
    } else {
      out[r][0].v = first;
      out[r][1].v = second;
    }
  }
}

struct Signed {
  static constexpr int kMax = 128, kZero = 0, kPanelGroups = 2;
  static Partial dot(Bytes32 w, Bytes32 x) {
    const int32x4_t zero = vdupq_n_s32(0);
    return {add_products(zero, w.low, x.low), add_products(zero, w.high, x.high)};
  }
};

template <int kMaxCode, int kZeroCode = 0>   // up to 64: signed bytes too
struct Unsigned : Signed {
  static constexpr int kMax = kMaxCode, kZero = kZeroCode;
};

}  // namespace ft::isa_neon
