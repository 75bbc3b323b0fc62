// Products of codes with int8 activations, with AVX2: as int16 pairs first. Their meaning: simd/scalar_int8.h.
#pragma once

#include <algorithm>

#include "simd/int8_256.h"

namespace ft::FT_ISA_NAMESPACE {

template <class Codes>
struct Products : Codes {
  static __m256i pairs(__m256i w, __m256i x) {   // 2 * 128 * 127 fits int16
    return _mm256_maddubs_epi16(Codes::codes(w), Codes::activations(w, x));
  }
  // Lane i: the sum of the products of bytes 4i .. 4i + 3 of w[0 .. kCount - 1] and x(0) .. x(kCount - 1).
  // int16 lanes take the products of kFit vectors before they are widened.
  template <int kCount, class X>
  static __m256i fours(const __m256i* w, X x) {
    constexpr int kMost = 32767 / (2 * 127 * Codes::kMax);
    constexpr int kFit = kMost >= kCount ? kCount : kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
    __m256i sums;
#pragma GCC unroll 8
    for (int g = 0; g < kCount; g += kFit) {
      __m256i fit = pairs(w[g], x(g));
#pragma GCC unroll 8
      for (int i = g + 1; i < g + kFit; ++i) fit = _mm256_add_epi16(fit, pairs(w[i], x(i)));
      const __m256i wide = _mm256_madd_epi16(fit, _mm256_set1_epi16(1));
      sums = g == 0 ? wide : _mm256_add_epi32(sums, wide);
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
  constexpr int kLargest = std::max(Product::kZero, Product::kMax - Product::kZero);
  constexpr int kMost = 32767 / (2 * 255 * kLargest);   // vectors of products that an int16 lane takes
  constexpr int kFit = kMost >= kPart ? kPart : kMost >= 4 ? 4 : 2;
  static_assert(kMost >= 2);
#pragma GCC unroll 2
  for (int i = 0; i < kParts; ++i) {
#pragma GCC unroll 2
    for (int r = 0; r < kGroups; ++r) out[r][i].v = blocks[r]->surplus[i];
#pragma GCC unroll 4
    for (int g = i * kPart; g < (i + 1) * kPart; g += kFit) {
      __m256i fit[kGroups];
#pragma GCC unroll 8
      for (int k = g; k < g + kFit; ++k) {
        const __m256i four = broadcast_4(x.raised + 4 * k);
#pragma GCC unroll 2
        for (int r = 0; r < kGroups; ++r) {
          const __m256i pairs = _mm256_maddubs_epi16(four, blocks[r]->group(k));
          fit[r] = k == g ? pairs : _mm256_add_epi16(fit[r], pairs);
        }
      }
#pragma GCC unroll 2
      for (int r = 0; r < kGroups; ++r) {
        out[r][i].v = _mm256_add_epi32(out[r][i].v, _mm256_madd_epi16(fit[r], _mm256_set1_epi16(1)));
      }
    }
  }
}

}  // namespace ft::FT_ISA_NAMESPACE
