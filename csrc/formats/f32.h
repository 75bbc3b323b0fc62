#pragma once

#include "formats/float_dot.h"

namespace ft::FT_ISA_NAMESPACE {

struct F32Weights {
  static constexpr int kBytes = 4;
  static F32 load(const std::uint8_t* p) { return F32::load(reinterpret_cast<const float*>(p)); }
  static F32 load_partial(const std::uint8_t* p, int n) {
    return F32::load_partial(reinterpret_cast<const float*>(p), n);
  }
  static float to_f32(const std::uint8_t* p) {
    float v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
};

}  // namespace ft::FT_ISA_NAMESPACE
