// 4-bit floats: a sign and the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Twice those, shifted up by 12, are
// integers from 0 to 24: an integer dot product is exact and needs no signs.
#pragma once

#include "simd/simd.h"

namespace ft::FT_ISA_NAMESPACE {

struct E2m1 {
  static constexpr int kShift = 12;
  using Product = Unsigned<24, kShift>;
  static constexpr std::uint8_t kShifted[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

  static Bytes32 decode(Bytes32 nibbles) { return Bytes32::lookup(kShifted, nibbles); }   // to shifted numbers
  // y = the n numbers of shifted codes, times a scale; n is a multiple of kWidth.
  static void dequantize(const std::uint8_t* shifted, int n, float scale, float* y) {
    const F32 half = F32::broadcast(0.5f * scale), shift = F32::broadcast(static_cast<float>(kShift));
    for (int i = 0; i < n; i += F32::kWidth) ((F32::load_u8(shifted + i) - shift) * half).store(y + i);
  }
};

}  // namespace ft::FT_ISA_NAMESPACE
