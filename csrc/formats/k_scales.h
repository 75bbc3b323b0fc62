// What Q4_K and Q5_K have in common: blocks of 256 with float16 d, float16 dmin and 12 bytes that hold
// 8 scales and 8 minima of 6 bits, one of each for 32 columns. value = q * (d * scale) - dmin * minimum.
#pragma once

#include "formats/quantized_dot.h"

namespace ft::FT_ISA_NAMESPACE {

struct KScales {
  static constexpr int kColumns = 256;
  using Codes = WholeBytes;
  static constexpr int kParts = 1;
  static constexpr int kScales = 2;   // d * scale, dmin * minimum

  static void scales(const std::uint8_t* p, std::int64_t stride, F32 (&s)[16]) {
    I32 word[4];
    gather_words(p, stride, word);
    const F32 d = low_f16(word[0]);
    const F32 dmin = high_f16(word[0]);
    // Bytes of 6 bits. Of 4..7 the upper two are the upper two of the bytes of 0..3.
    const I32 six = I32::broadcast(0x3f3f3f3f);
    const I32 four = I32::broadcast(0x0f0f0f0f);
    const I32 top = I32::broadcast(0x30303030);
    const I32 scale[2] = {word[1] & six, (word[3] & four) | (shift_right(word[1], 2) & top)};
    const I32 minimum[2] = {word[2] & six,
                            (shift_right(word[3], 4) & four) | (shift_right(word[2], 2) & top)};
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      s[2 * i] = d * to_f32(unsigned_byte(scale[i / 4], i % 4));
      s[2 * i + 1] = dmin * to_f32(unsigned_byte(minimum[i / 4], i % 4));
    }
  }
  static F32 add_block(F32 sum, const F32* s, const I32 (&dot)[kParts], const TokenBlock& x) {
    const F32 codes = (s[0] * F32::broadcast(x.d)) * to_f32(dot[0]);
    return sum + (codes - s[1] * F32::broadcast(x.d * static_cast<float>(x.sum())));
  }
  // The two factors of columns 32 i .. 32 i + 31.
  static void scale_of(const std::uint8_t* p, int i, float& scale, float& minimum) {
    const std::uint8_t* b = p + 4;
    const int sc = i < 4 ? b[i] & 63 : (b[i + 4] & 15) | (b[i - 4] >> 6) << 4;
    const int m = i < 4 ? b[i + 4] & 63 : b[i + 4] >> 4 | (b[i] >> 6) << 4;
    scale = f16_to_f32(load_u16(p)) * static_cast<float>(sc);
    minimum = f16_to_f32(load_u16(p + 2)) * static_cast<float>(m);
  }
};

}  // namespace ft::FT_ISA_NAMESPACE
