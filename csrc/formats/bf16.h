#pragma once

#include "formats/float_dot.h"

namespace ft::FT_ISA_NAMESPACE {

struct BF16Weights {   // the upper half of a float32
  static constexpr int kBytes = 2;
  static F32 load(const std::uint8_t* p) { return F32::load_bf16(p); }
  static F32 load_partial(const std::uint8_t* p, int n) { return F32::load_bf16_partial(p, n); }
  static float to_f32(const std::uint8_t* p) {
    const std::uint32_t bits = static_cast<std::uint32_t>(load_u16(p)) << 16;
    float v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  }
};

}  // namespace ft::FT_ISA_NAMESPACE
