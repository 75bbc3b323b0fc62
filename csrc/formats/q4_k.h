// Blocks of 256: the scales of k_scales.h, then 128 bytes. Of each 32 bytes the low nibbles are 32 columns,
// and the high nibbles the 32 after them.
#pragma once

#include "formats/k_scales.h"

namespace ft::FT_ISA_NAMESPACE {

struct Q4_K : KScales {
  using Product = Unsigned<15>;

  static Bytes32 codes(const std::uint8_t* p, int i) {
    return Bytes32::load(p + i / 2 * 32).bits(i % 2 * -4, 0x0f);
  }
  static void dequantize(const std::uint8_t* codes, const std::uint8_t* scales, float* y) {
    for (int i = 0; i < 8; ++i) {
      float scale, minimum;
      scale_of(scales, i, scale, minimum);
      for (int j = 0; j < 32; ++j) {
        const int code = codes[i / 2 * 32 + j] >> i % 2 * 4 & 15;
        *y++ = static_cast<float>(code) * scale - minimum;
      }
    }
  }
};

}  // namespace ft::FT_ISA_NAMESPACE
