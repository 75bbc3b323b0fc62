// Products of codes with int8 activations, for instruction sets that add up products of bytes by fours: they
// supply dpbusd(sum, w, x), each lane of sum + its 4 products of unsigned w and signed x, without saturation.
// Their meaning: simd/scalar_int8.h.
#pragma once

#include "simd/int8_256.h"

namespace ft::FT_ISA_NAMESPACE {

template <class Codes>
struct Products : Codes {
  // Lane i: the sum of the products of bytes 4i .. 4i + 3 of w[0 .. kCount - 1] and x(0) .. x(kCount - 1).
  template <int kCount, class X>
  static __m256i fours(const __m256i* w, X x) {
    __m256i sums = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      sums = dpbusd(sums, Codes::codes(w[i]), Codes::activations(w[i], x(i)));
    }
    return sums;
  }
  static Partial dot(Bytes32 w, Bytes32 x) { return {fours<1>(&w.v, [&](int) { return x.v; })}; }
};

template <int kMaxCode, int kZeroCode = 0>
struct Unsigned : Products<UnsignedCodes<kMaxCode, kZeroCode>> {};
struct Signed : Products<SignedCodes> {};

template <class Product, int kParts, int kGroups>
FT_INLINE void panel_dot(const PanelBlock<Product, kParts>* const (&blocks)[kGroups], const PanelToken& x,
               I32 (&out)[kGroups][kParts]) {
  constexpr int kPart = 8 / kParts;
#pragma GCC unroll 2
  for (int i = 0; i < kParts; ++i) {
#pragma GCC unroll 2
    for (int r = 0; r < kGroups; ++r) out[r][i].v = blocks[r]->surplus[i];
#pragma GCC unroll 8
    for (int g = i * kPart; g < (i + 1) * kPart; ++g) {
      const __m256i four = broadcast_4(x.raised + 4 * g);
#pragma GCC unroll 2
      for (int r = 0; r < kGroups; ++r) out[r][i].v = dpbusd(out[r][i].v, four, blocks[r]->group(g));
    }
  }
}

}  // namespace ft::FT_ISA_NAMESPACE
