// 4-bit floats with one e4m3 scale for 16 of them. value = e2m1 * scale. NVFP4: blocks of 64, 4 scales,
// then 8 bytes for each 16 elements, byte j of them with element j in its low nibble and j + 8 in the high
// one. NVFP4_PAIRS: byte j of a row holds the elements 2j and 2j + 1, and the scales lie apart; codes and
// scales of a row are contiguous.
#pragma once

#include "formats/e2m1.h"
#include "formats/quantized_dot.h"

namespace ft::FT_ISA_NAMESPACE {

template <class NibbleOrder, int kStepColumns>
struct Nvfp4Blocks {
  static constexpr int kColumns = kStepColumns;
  using Product = E2m1::Product;
  using Codes = Nibbles<NibbleOrder>;
  static constexpr int kParts = 2;
  static constexpr int kScales = 2;

  static Bytes32 decode(Bytes32 nibbles) { return E2m1::decode(nibbles); }
  static void scales(const std::uint8_t* p, std::int64_t stride, F32 (&s)[kColumns / 16]) {
    gather_e4m3(p, stride, s);
    for (F32& scale : s) scale = scale * F32::broadcast(0.5f * kE4m3Unit);   // the codes are doubled
  }
  // Scale times integer is exact: 4 bits and 15.
  static F32 add_block(F32 sum, const F32* s, const I32 (&dot)[kParts], const TokenBlock& x) {
    const F32 first = s[0] * to_f32(dot[0]);
    const F32 second = s[1] * to_f32(dot[1]);
    return sum + (first + second) * F32::broadcast(x.d);
  }
  static void dequantize(const std::uint8_t* codes, const std::uint8_t* scales, float* y) {
    for (int i = 0; i < kColumns / 32; ++i, scales += 2, codes += 16, y += 32) {
      std::uint8_t in_order[32];
      NibbleOrder::restore(decode(Bytes32::load_nibbles(codes))).store(in_order);
      E2m1::dequantize(in_order, 16, e4m3_to_f32(scales[0]), y);
      E2m1::dequantize(in_order + 16, 16, e4m3_to_f32(scales[1]), y + 16);
    }
  }
};

using NVFP4 = Nvfp4Blocks<QuartersSwapped, 64>;
using NVFP4_PAIRS = Nvfp4Blocks<EvensFirst, 32>;
using NVFP4_PAIRS_Wide = Nvfp4Blocks<EvensFirst, 64>;   // the scales of four blocks at once

}  // namespace ft::FT_ISA_NAMESPACE
