#pragma once

#include "formats/float_dot.h"

namespace ft::FT_ISA_NAMESPACE {

struct F16Weights {
  static constexpr int kBytes = 2;
  static F32 load(const std::uint8_t* p) { return F32::load_f16(p); }
  static F32 load_partial(const std::uint8_t* p, int n) { return F32::load_f16_partial(p, n); }
  static float to_f32(const std::uint8_t* p) { return f16_to_f32(load_u16(p)); }
};

}  // namespace ft::FT_ISA_NAMESPACE
