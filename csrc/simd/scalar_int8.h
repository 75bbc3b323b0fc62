// Products of codes with int8 activations in plain C++: what they mean is said here; the other headers of
// this kind only say how.
#pragma once

#include "simd/scalar.h"

namespace ft::isa_scalar {

// 32 bytes: the codes of 32 columns of a row, or the int8 activations that meet them.
struct Bytes32 {
  std::uint8_t v[32];

  static Bytes32 load(const void* p) {
    Bytes32 r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
  }
  void store(std::uint8_t* p) const { std::memcpy(p, v, sizeof v); }
  // 16 bytes to 32 numbers 0..15: the low nibbles, then the high ones.
  static Bytes32 load_nibbles(const std::uint8_t* p) {
    Bytes32 r;
    for (int i = 0; i < 16; ++i) {
      r.v[i] = p[i] & 0x0f;
      r.v[i + 16] = p[i] >> 4;
    }
    return r;
  }
  // Bytes 0..15 of a table, by numbers 0..15.
  static Bytes32 lookup(const std::uint8_t (&table)[16], Bytes32 index) {
    Bytes32 r;
    for (int i = 0; i < 32; ++i) r.v[i] = table[index.v[i]];
    return r;
  }
  // Every byte moved up by `up` places (down if negative), then masked. Bits that come from a neighbouring
  // byte must not be in the mask.
  Bytes32 bits(int up, int mask) const {
    Bytes32 r;
    for (int i = 0; i < 32; ++i) {
      r.v[i] = static_cast<std::uint8_t>((up < 0 ? v[i] >> -up : v[i] << up) & mask);
    }
    return r;
  }
  // Quarters of 8 bytes: 0 2 1 3.
  Bytes32 swap_quarters() const {
    Bytes32 r = *this;
    std::memcpy(r.v + 8, v + 16, 8);
    std::memcpy(r.v + 16, v + 8, 8);
    return r;
  }
  // Elements 0 2 4 .. 30 1 3 5 .. 31, and back.
  Bytes32 evens_first() const {
    Bytes32 r;
    for (int i = 0; i < 32; ++i) r.v[i] = v[i < 16 ? 2 * i : 2 * i - 31];
    return r;
  }
  Bytes32 interleave_halves() const {
    Bytes32 r;
    for (int i = 0; i < 32; ++i) r.v[i] = v[i / 2 + i % 2 * 16];
    return r;
  }
};

inline Bytes32 operator|(Bytes32 a, Bytes32 b) {
  for (int i = 0; i < 32; ++i) a.v[i] |= b.v[i];
  return a;
}

// 32 columns of kWidth rows so that a lane is a row: 8 groups of kWidth * 4 bytes, in group g the codes
// 4g..4g+3 of each row.
inline void store_panel(const Bytes32 (&rows)[F32::kWidth], std::uint8_t* panel) {
  std::memcpy(panel, rows[0].v, 32);
}

// The same for codes in nibbles, 16 bytes of each row: W::decode turns nibbles into codes, and
// W::Codes::Order says which columns they are.
template <class W>
void store_nibble_panel(const std::uint8_t* p, std::int64_t, std::uint8_t* panel) {
  using Order = typename W::Codes::Order;
  const Bytes32 codes = W::decode(Bytes32::load_nibbles(p));
  for (int i = 0; i < 16; ++i) {
    const int low = Order::kInterleaved ? 2 * i : 4 * Order::low_group(i / 4) + i % 4;
    const int high = Order::kInterleaved ? 2 * i + 1 : 4 * Order::high_group(i / 4) + i % 4;
    panel[low] = codes.v[i];
    panel[high] = codes.v[i + 16];
  }
}

// Products of 32 codes with 32 int8 activations in [-127, 127], added up within each quarter of 8 or more
// finely; the sums are exact.
struct Partial {
  std::int32_t quarter[4];
};

// The sums of kWidth rows, lane r for p[r]; no code has a magnitude above Product::kMax. `whole`: of all 32 columns. `halves`: of columns 0..15 and of 16..31.
// `nibbles`: of kWidth rows whose 16 bytes at p + r * stride hold the codes, against activations in the order
// of the nibbles; two sums are those of the nibbles of bytes 0..7 and of bytes 8..15.
template <class Product>
struct Sums {
  static void whole(const Partial (&p)[F32::kWidth], I32 (&out)[1]) {
    const auto& q = p[0].quarter;
    out[0].v = q[0] + q[1] + q[2] + q[3];
  }
  static void halves(const Partial (&p)[F32::kWidth], I32 (&out)[2]) {
    const auto& q = p[0].quarter;
    out[0].v = q[0] + q[1];
    out[1].v = q[2] + q[3];
  }
  template <class W>
  static void nibbles(const std::uint8_t* p, std::int64_t, Bytes32 x, I32 (&out)[1]) {
    const Partial sums[1] = {Product::dot(W::decode(Bytes32::load_nibbles(p)), x)};
    whole(sums, out);
  }
  template <class W>
  static void nibbles(const std::uint8_t* p, std::int64_t, Bytes32 x, I32 (&out)[2]) {
    const Partial sums = Product::dot(W::decode(Bytes32::load_nibbles(p)), x);
    out[0].v = sums.quarter[0] + sums.quarter[2];
    out[1].v = sums.quarter[1] + sums.quarter[3];
  }
};

// What a panel keeps of 32 columns of kWidth rows: store_panel writes to `codes`, then comes `finish`.
template <class Product, int kParts>
struct PanelBlock {
  std::uint8_t codes[32];
  void finish() {}
};

// 32 activations of a token, and the same plus 128.
struct PanelToken {
  const std::int8_t* q;
  const std::uint8_t* raised;
};

// out[r][i], lane l = (row l of block r, less the code of zero) . x over the i-th of kParts equal ranges of
// columns. A panel has blocks of Product::kPanelGroups groups of rows, which share what is loaded of a token.
template <class Product, int kParts, int kGroups>
FT_INLINE void panel_dot(const PanelBlock<Product, kParts>* const (&blocks)[kGroups], const PanelToken& x,
               I32 (&out)[kGroups][kParts]) {
  for (int r = 0; r < kGroups; ++r) {
    for (int i = 0; i < kParts; ++i) out[r][i].v = 0;
    for (int c = 0; c < 32; ++c) {
      out[r][c * kParts / 32].v += (Product::code(blocks[r]->codes[c]) - Product::kZero) * x.q[c];
    }
  }
}

template <class Product>
Partial products(const Bytes32& w, const Bytes32& x) {
  Partial p = {};
  for (int i = 0; i < 32; ++i) p.quarter[i / 8] += Product::code(w.v[i]) * static_cast<std::int8_t>(x.v[i]);
  return p;
}

template <int kMaxCode, int kZeroCode = 0>   // codes 0..kMaxCode, at most 64; kZeroCode means zero
struct Unsigned {
  static constexpr int kMax = kMaxCode, kZero = kZeroCode, kPanelGroups = 2;
  static std::int32_t code(std::uint8_t byte) { return byte; }
  static Partial dot(Bytes32 w, Bytes32 x) { return products<Unsigned>(w, x); }
};

struct Signed {   // codes -128..127
  static constexpr int kMax = 128, kZero = 0, kPanelGroups = 1;
  static std::int32_t code(std::uint8_t byte) { return static_cast<std::int8_t>(byte); }
  static Partial dot(Bytes32 w, Bytes32 x) { return products<Signed>(w, x); }
};

}  // namespace ft::isa_scalar
