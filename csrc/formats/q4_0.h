// Blocks of 32: float16 d, then 16 bytes, byte j with element j in its low nibble and j + 16 in the
// high one. value = (q - 8) * d.
#pragma once

#include "formats/quantized_dot.h"

namespace ft::FT_ISA_NAMESPACE {

struct Q4_0 {
  static constexpr int kColumns = 32;
  using Product = Unsigned<15, 8>;
  using Codes = Nibbles<InOrder>;
  static constexpr int kParts = 1;
  static constexpr int kScales = 1;

  static Bytes32 decode(Bytes32 nibbles) { return nibbles; }
  static void scales(const std::uint8_t* p, std::int64_t stride, F32 (&s)[kScales]) {
    s[0] = F32::gather_f16(p, stride);
  }
  static F32 add_block(F32 sum, const F32* s, const I32 (&dot)[kParts], const TokenBlock& x) {
    return sum + (s[0] * F32::broadcast(x.d)) * to_f32(dot[0]);
  }
  static void dequantize(const std::uint8_t* codes, const std::uint8_t* scales, float* y) {
    const float d = f16_to_f32(load_u16(scales));
    for (int i = 0; i < 16; ++i) {
      y[i] = static_cast<float>((codes[i] & 0x0f) - 8) * d;
      y[i + 16] = static_cast<float>((codes[i] >> 4) - 8) * d;
    }
  }
};

}  // namespace ft::FT_ISA_NAMESPACE
