// Blocks of 256: 128 bytes of low nibbles, 64 bytes of upper bit pairs, then 16 int8 scales, one for 16
// columns, and float16 d. value = (q - 32) * (d * scale). Of 128 columns, the nibbles are those of 64 bytes
// (low ones, then high ones), and the pairs those of 32 bytes (lowest first).
#pragma once

#include "formats/quantized_dot.h"

namespace ft::FT_ISA_NAMESPACE {

struct Q6_K {
  static constexpr int kColumns = 256;
  using Product = Unsigned<63, 32>;
  using Codes = WholeBytes;
  static constexpr int kParts = 2;
  static constexpr int kScales = 2;

  static Bytes32 codes(const std::uint8_t* p, int i) {
    const Bytes32 nibbles = Bytes32::load(p + i / 4 * 64 + i % 2 * 32);
    const Bytes32 pairs = Bytes32::load(p + 128 + i / 4 * 32);
    return nibbles.bits(i / 2 % 2 * -4, 0x0f) | pairs.bits(4 - i % 4 * 2, 0x30);
  }
  static void scales(const std::uint8_t* p, std::int64_t stride, F32 (&s)[16]) {
    I32 word[4];
    gather_words(p, stride, word);
    const F32 d = F32::gather_f16(p + 16, stride);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) s[i] = d * to_f32(signed_byte(word[i / 4], i % 4));
  }
  static F32 add_block(F32 sum, const F32* s, const I32 (&dot)[kParts], const TokenBlock& x) {
    const F32 d = F32::broadcast(x.d);
    const F32 first = (s[0] * d) * to_f32(dot[0]);
    return sum + (first + (s[1] * d) * to_f32(dot[1]));
  }
  static void dequantize(const std::uint8_t* codes, const std::uint8_t* scales, float* y) {
    const float d = f16_to_f32(load_u16(scales + 16));
    for (int c = 0; c < 256; ++c) {
      const int i = c / 32, j = c % 32;
      const int nibble = codes[i / 4 * 64 + i % 2 * 32 + j] >> i / 2 % 2 * 4 & 15;
      const int code = nibble | (codes[128 + i / 4 * 32 + j] >> i % 4 * 2 & 3) << 4;
      const float scale = d * static_cast<float>(static_cast<std::int8_t>(scales[c / 16]));
      y[c] = static_cast<float>(code - 32) * scale;
    }
  }
};

}  // namespace ft::FT_ISA_NAMESPACE
