// MXFP4_PAIRS whose activations are first rounded to FP8, as the model was trained: DeepSeek's act_quant
// (inference/kernel.py of its checkpoints, and the FP8 x FP4 kernels that transformers calls) gives 128
// columns the scale s = 2^ceil(log2(max(max|x|, 1e-4) * (1 / 448))), the logarithm by the bits of the
// float32 product, and each number the nearest e4m3 number (ties to even) to x / s within +-448.
#pragma once

#include "formats/mxfp4.h"

namespace ft::FT_ISA_NAMESPACE {

struct DS_FP4 : MXFP4_PAIRS {
  static constexpr int kRoundedColumns = 128;
};
using DS_FP4_Wide = MXFP4_PAIRS_Wide;

inline float fp8_scale(float largest) {   // a power of two from 2^-22 to 2^120
  const float least = largest < 1e-4f ? 1e-4f : largest;
  const float quotient = least * (1.0f / 448.0f);
  std::uint32_t bits;
  std::memcpy(&bits, &quotient, sizeof bits);
  bits = (bits + 0x007fffffu) & 0x7f800000u;   // the next power of two, or the same
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

// The nearest e4m3 number to v, |v| <= 448: a multiple of an eighth of its power of two, of 2^-9 at least.
// Adding and subtracting a number whose last place is that step rounds to it.
inline F32 round_to_e4m3(F32 v) {
  const F32 power = max(power_of_two_below(v), F32::broadcast(0x1p-6f));
  const F32 anchor = power * F32::broadcast(0x1.8p20f);
  return (v + anchor) - anchor;
}

// y = the FP8 form of x, times its scale; at most 128 columns. All NaN if one of them is not finite.
inline void round_fp8_block(const float* x, int cols, float* y) {
  F32 largest = F32::zero();
  F32 poison = F32::zero();   // 0 * x
  for (int c = 0; c < cols; c += F32::kWidth) {
    const F32 v = F32::load(x + c);
    largest = max(largest, abs(v));
    poison = poison + v * F32::zero();
  }
  const float scale = fp8_scale(hmax(largest));
  const F32 up = F32::broadcast(scale), down = F32::broadcast(1.0f / scale);
  const F32 limit = F32::broadcast(448.0f), bad = F32::broadcast(hsum(poison));
  for (int c = 0; c < cols; c += F32::kWidth) {
    const F32 v = max(min(F32::load(x + c) * down, limit), F32::zero() - limit);
    (round_to_e4m3(v) * up + bad).store(y + c);
  }
}

// cols is a multiple of 32; the last block may be shorter than 128.
inline void round_fp8(const float* x, std::int64_t cols, float* y) {
  for (std::int64_t c = 0; c < cols; c += DS_FP4::kRoundedColumns) {
    const std::int64_t left = cols - c;
    round_fp8_block(x + c, static_cast<int>(left < DS_FP4::kRoundedColumns ? left : DS_FP4::kRoundedColumns), y + c);
  }
}

}  // namespace ft::FT_ISA_NAMESPACE
