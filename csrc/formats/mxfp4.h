// Blocks of 32 4-bit floats with one scale, a power of two (e8m0: 2^(x - 127), 255 is NaN).
// value = e2m1 * scale. MXFP4: byte j holds element j in its low nibble and j + 16 in the high one.
// MXFP4_PAIRS: byte j of a row holds the elements 2j and 2j + 1, and the scales lie apart; codes and scales of
// a row are contiguous.
#pragma once

#include "formats/e2m1.h"
#include "formats/quantized_dot.h"

namespace ft::FT_ISA_NAMESPACE {

template <class NibbleOrder, int kStepColumns>
struct Mxfp4Blocks {
  static constexpr int kColumns = kStepColumns;
  using Product = E2m1::Product;
  using Codes = Nibbles<NibbleOrder>;
  static constexpr int kParts = 1;
  static constexpr int kScales = 1;

  static Bytes32 decode(Bytes32 nibbles) { return E2m1::decode(nibbles); }
  static void scales(const std::uint8_t* p, std::int64_t stride, F32 (&s)[kColumns / 32]) {
    if constexpr (kColumns == 32) s[0] = gather_e8m0(p, stride);
    else gather_e8m0(p, stride, s);
  }
  static F32 add_block(F32 sum, const F32* s, const I32 (&dot)[kParts], const TokenBlock& x) {
    return sum + (s[0] * F32::broadcast(0.5f * x.d)) * to_f32(dot[0]);
  }
  static void dequantize(const std::uint8_t* codes, const std::uint8_t* scales, float* y) {
    for (int i = 0; i < kColumns / 32; ++i, ++scales, codes += 16, y += 32) {
      std::uint8_t in_order[32];
      NibbleOrder::restore(decode(Bytes32::load_nibbles(codes))).store(in_order);
      E2m1::dequantize(in_order, 32, e8m0_to_f32(*scales), y);
    }
  }
};

using MXFP4 = Mxfp4Blocks<InOrder, 32>;
using MXFP4_PAIRS = Mxfp4Blocks<EvensFirst, 32>;
using MXFP4_PAIRS_Wide = Mxfp4Blocks<EvensFirst, 128>;   // the scales of four blocks at once

}  // namespace ft::FT_ISA_NAMESPACE
