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

template <int kMaxCode>
using Unsigned = Products<UnsignedCodes<kMaxCode>>;
using Signed = Products<SignedCodes>;

}  // namespace ft::FT_ISA_NAMESPACE
