// Blocks of 256: the scales of k_scales.h, then 32 bytes of fifth bits, bit i of byte j for column 32 i + j,
// then 128 bytes of nibbles as in Q4_K.
#pragma once

#include "formats/k_scales.h"

namespace ft::FT_ISA_NAMESPACE {

struct Q5_K : KScales {
  using Product = Unsigned<31>;

  static Bytes32 codes(const std::uint8_t* p, int i) {
    return Bytes32::load(p + 32 + i / 2 * 32).bits(i % 2 * -4, 0x0f) | Bytes32::load(p).bits(4 - i, 0x10);
  }
  static void dequantize(const std::uint8_t* codes, const std::uint8_t* scales, float* y) {
    for (int i = 0; i < 8; ++i) {
      float scale, minimum;
      scale_of(scales, i, scale, minimum);
      for (int j = 0; j < 32; ++j) {
        const int code = (codes[32 + i / 2 * 32 + j] >> i % 2 * 4 & 15) | (codes[j] >> i & 1) << 4;
        *y++ = static_cast<float>(code) * scale - minimum;
      }
    }
  }
};

}  // namespace ft::FT_ISA_NAMESPACE
