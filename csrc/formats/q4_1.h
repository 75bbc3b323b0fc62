// Blocks of 32: float16 d, float16 m, then 16 bytes of nibbles in the order of Q4_0.
// value = q * d + m.
#pragma once

#include "formats/quantized_dot.h"

namespace ft::FT_ISA_NAMESPACE {

struct Q4_1 {
  static constexpr int kColumns = 32;
  using Product = Unsigned<15>;
  using Codes = Nibbles<InOrder>;
  static constexpr int kParts = 1;
  static constexpr int kScales = 2;

  static Bytes32 decode(Bytes32 nibbles) { return nibbles; }
  static void scales(const std::uint8_t* p, std::int64_t stride, F32 (&s)[kScales]) {
    s[0] = F32::gather_f16(p, stride);
    s[1] = F32::gather_f16(p + 2, stride);
  }
  static F32 add_block(F32 sum, const F32* s, const I32 (&dot)[kParts], const TokenBlock& x) {
    const F32 codes = (s[0] * F32::broadcast(x.d)) * to_f32(dot[0]);
    return sum + (codes + s[1] * F32::broadcast(x.d * static_cast<float>(x.sum())));
  }
  static void dequantize(const std::uint8_t* codes, const std::uint8_t* scales, float* y) {
    const float d = f16_to_f32(load_u16(scales));
    const float m = f16_to_f32(load_u16(scales + 2));
    for (int i = 0; i < 16; ++i) {
      y[i] = static_cast<float>(codes[i] & 0x0f) * d + m;
      y[i + 16] = static_cast<float>(codes[i] >> 4) * d + m;
    }
  }
};

}  // namespace ft::FT_ISA_NAMESPACE
