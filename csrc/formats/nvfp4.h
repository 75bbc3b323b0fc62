// 4-bit floats with one e4m3 scale for 16 of them. value = e2m1 * scale. NVFP4: blocks of 64, 4 scales,
// then 8 bytes for each 16 elements, byte j of them with element j in its low nibble and j + 8 in the high
// one. NVFP4_PAIRS: byte j of a row holds the elements 2j and 2j + 1, and the scales lie apart; codes and
// scales of a row are contiguous.
#pragma once

#include <type_traits>

#include "formats/e2m1.h"
#include "formats/quantized_dot.h"

namespace ft::FT_ISA_NAMESPACE {

template <class NibbleOrder, int kStepColumns>
struct Nvfp4Blocks {
  static constexpr int kColumns = kStepColumns;
  using Product = E2m1::Product;
  using Order = NibbleOrder;
  static constexpr int kParts = 2;
  static constexpr int kScales = 2;

  static Bytes32 codes(const std::uint8_t* p, int i) { return E2m1::load(p + 16 * i); }
  static void scales(const std::uint8_t* p, std::int64_t stride, F32 (&s)[kColumns / 16]) {
    gather_e4m3(p, stride, s);
    for (F32& scale : s) scale = scale * F32::broadcast(0.5f * kE4m3Unit);   // the codes are doubled
  }
  // Scale times integer is exact: 4 bits and 15.
  static F32 add_block(F32 sum, const F32* s, const I32 (&dot)[kParts], const TokenBlock& x) {
    const F32 first = s[0] * E2m1::twice_dot(dot[0], x.half_sum[0]);
    const F32 second = s[1] * E2m1::twice_dot(dot[1], x.half_sum[1]);
    return sum + (first + second) * F32::broadcast(x.d);
  }
  static void dequantize(const std::uint8_t* codes, const std::uint8_t* scales, float* y) {
    constexpr bool kPairs = std::is_same_v<Order, EvensFirst>;
    for (int part = 0; part < kColumns / 16; ++part, y += 16, codes += 8) {
      const float d = e4m3_to_f32(scales[part]);
      for (int i = 0; i < 8; ++i) {
        y[kPairs ? 2 * i : i] = E2m1::value(codes[i] & 0x0f) * d;
        y[kPairs ? 2 * i + 1 : i + 8] = E2m1::value(codes[i] >> 4) * d;
      }
    }
  }
};

using NVFP4 = Nvfp4Blocks<QuartersSwapped, 64>;
using NVFP4_PAIRS = Nvfp4Blocks<EvensFirst, 32>;

}  // namespace ft::FT_ISA_NAMESPACE
