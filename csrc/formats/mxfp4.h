// Blocks of 32 4-bit floats with one scale, a power of two (e8m0: 2^(x - 127), 255 is NaN).
// value = e2m1 * scale. MXFP4: byte j holds element j in its low nibble and j + 16 in the high one.
// MXFP4_PAIRS: byte j holds the elements 2j and 2j + 1.
#pragma once

#include "formats/e2m1.h"
#include "formats/quantized_dot.h"

namespace ft::FT_ISA_NAMESPACE {

template <class NibbleOrder>
struct Mxfp4Blocks {
  static constexpr int kColumns = 32;
  using Product = E2m1::Product;
  using Codes = Nibbles<NibbleOrder>;
  static constexpr int kParts = 1;
  static constexpr int kScales = 1;

  static Bytes32 decode(Bytes32 nibbles) { return E2m1::decode(nibbles); }
  static void scales(const std::uint8_t* p, std::int64_t stride, F32 (&s)[kScales]) {
    s[0] = gather_e8m0(p, stride);
  }
  static F32 add_block(F32 sum, const F32* s, const I32 (&dot)[kParts], const TokenBlock& x) {
    return sum + (s[0] * F32::broadcast(0.5f * x.d)) * E2m1::twice_dot(dot[0], x.sum());
  }
  static void dequantize(const std::uint8_t* codes, const std::uint8_t* scales, float* y) {
    std::uint8_t in_order[32];
    NibbleOrder::restore(decode(Bytes32::load_nibbles(codes))).store(in_order);
    E2m1::dequantize(in_order, 32, e8m0_to_f32(*scales), y);
  }
};

using MXFP4 = Mxfp4Blocks<InOrder>;
using MXFP4_PAIRS = Mxfp4Blocks<EvensFirst>;

}  // namespace ft::FT_ISA_NAMESPACE
