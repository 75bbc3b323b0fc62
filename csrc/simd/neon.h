// The primitives with NEON of AArch64. Their meaning: simd/scalar.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace ft::isa_neon {

inline std::uint16_t load_u16(const void* p) {
  std::uint16_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline std::uint32_t load_u32(const void* p) {
  std::uint32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Lane r is the 2 or 4 bytes at p + r * stride.
inline uint16x4_t gather_u16(const std::uint8_t* p, std::int64_t stride) {
  uint16x4_t v = vdup_n_u16(load_u16(p));
  v = vset_lane_u16(load_u16(p + stride), v, 1);
  v = vset_lane_u16(load_u16(p + 2 * stride), v, 2);
  return vset_lane_u16(load_u16(p + 3 * stride), v, 3);
}
inline uint32x4_t gather_u32(const std::uint8_t* p, std::int64_t stride) {
  uint32x4_t v = vdupq_n_u32(load_u32(p));
  v = vsetq_lane_u32(load_u32(p + stride), v, 1);
  v = vsetq_lane_u32(load_u32(p + 2 * stride), v, 2);
  return vsetq_lane_u32(load_u32(p + 3 * stride), v, 3);
}

// Lane r of column[i] is lane i of row[r].
inline void transpose(const uint32x4_t (&row)[4], uint32x4_t (&column)[4]) {
  const uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(row[0], row[1]));   // lanes 0 and 2
  const uint64x2_t b = vreinterpretq_u64_u32(vtrn1q_u32(row[2], row[3]));
  const uint64x2_t c = vreinterpretq_u64_u32(vtrn2q_u32(row[0], row[1]));   // lanes 1 and 3
  const uint64x2_t d = vreinterpretq_u64_u32(vtrn2q_u32(row[2], row[3]));
  column[0] = vreinterpretq_u32_u64(vtrn1q_u64(a, b));
  column[1] = vreinterpretq_u32_u64(vtrn1q_u64(c, d));
  column[2] = vreinterpretq_u32_u64(vtrn2q_u64(a, b));
  column[3] = vreinterpretq_u32_u64(vtrn2q_u64(c, d));
}

inline float f16_to_f32(std::uint16_t h) {
  float16_t value;
  std::memcpy(&value, &h, sizeof value);
  return static_cast<float>(value);
}
inline float32x4_t f16_to_f32(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }

struct F32 {
  static constexpr int kWidth = 4;
  float32x4_t v;

  static F32 zero() { return {vdupq_n_f32(0.0f)}; }
  static F32 broadcast(float x) { return {vdupq_n_f32(x)}; }
  static F32 load(const float* p) { return {vld1q_f32(p)}; }
  static F32 load_f16(const void* p) { return {f16_to_f32(load_4_u16(p))}; }
  static F32 load_bf16(const void* p) {
    return {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(load_4_u16(p)), 16))};
  }
  static F32 load_partial(const float* p, int n) {
    float lanes[4] = {};
    std::memcpy(lanes, p, static_cast<std::size_t>(n) * 4);
    return load(lanes);
  }
  static F32 load_f16_partial(const void* p, int n) {
    std::uint16_t lanes[4] = {};
    std::memcpy(lanes, p, static_cast<std::size_t>(n) * 2);
    return load_f16(lanes);
  }
  static F32 load_bf16_partial(const void* p, int n) {
    std::uint16_t lanes[4] = {};
    std::memcpy(lanes, p, static_cast<std::size_t>(n) * 2);
    return load_bf16(lanes);
  }
  static F32 load_u8(const std::uint8_t* p) {
    const uint16x8_t wide = vmovl_u8(vcreate_u8(load_u32(p)));
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)))};
  }
  static F32 gather_f16(const std::uint8_t* p, std::int64_t stride) {
    return {f16_to_f32(gather_u16(p, stride))};
  }

  void store(float* p) const { vst1q_f32(p, v); }
  void store_partial(float* p, int n) const {
    float lanes[4];
    store(lanes);
    std::memcpy(p, lanes, static_cast<std::size_t>(n) * 4);
  }

 private:
  static uint16x4_t load_4_u16(const void* p) {
    return vreinterpret_u16_u8(vld1_u8(static_cast<const std::uint8_t*>(p)));
  }
};

inline F32 operator+(F32 a, F32 b) { return {vaddq_f32(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {vsubq_f32(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {vmulq_f32(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {vdivq_f32(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
// Not fmax and fmin, which return a NaN or never do.
inline F32 max(F32 a, F32 b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
inline F32 abs(F32 a) { return {vabsq_f32(a.v)}; }
inline F32 round(F32 a) { return {vrndnq_f32(a.v)}; }
inline F32 pow2(F32 n) {
  const int32x4_t biased = vaddq_s32(vcvtq_s32_f32(n.v), vdupq_n_s32(127));
  return {vreinterpretq_f32_s32(vshlq_n_s32(biased, 23))};
}
inline F32 power_of_two_below(F32 a) {
  return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v), vdupq_n_u32(0x7f800000)))};
}
inline F32 keep_nan(F32 a, F32 x) { return {vbslq_f32(vceqq_f32(x.v, x.v), a.v, x.v)}; }
inline float hsum(F32 a) { return vaddvq_f32(a.v); }
inline float hmax(F32 a) { return vmaxvq_f32(a.v); }
inline void add_to_doubles(F32 a, double* y) {
  vst1q_f64(y, vaddq_f64(vld1q_f64(y), vcvt_f64_f32(vget_low_f32(a.v))));
  vst1q_f64(y + 2, vaddq_f64(vld1q_f64(y + 2), vcvt_high_f64_f32(a.v)));
}

struct I32 {
  int32x4_t v;
  static I32 broadcast(std::int32_t x) { return {vdupq_n_s32(x)}; }
};

inline I32 operator-(I32 a, I32 b) { return {vsubq_s32(a.v, b.v)}; }
inline I32 operator&(I32 a, I32 b) { return {vandq_s32(a.v, b.v)}; }
inline I32 operator|(I32 a, I32 b) { return {vorrq_s32(a.v, b.v)}; }
inline I32 shift_right(I32 a, int n) {   // a shift by -n places
  return {vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.v), vdupq_n_s32(-n)))};
}
inline I32 unsigned_byte(I32 a, int i) { return shift_right(a, 8 * i) & I32::broadcast(0xff); }
inline I32 signed_byte(I32 a, int i) {
  return {vshrq_n_s32(vshlq_s32(a.v, vdupq_n_s32(24 - 8 * i)), 24)};
}
inline F32 low_f16(I32 a) { return {f16_to_f32(vmovn_u32(vreinterpretq_u32_s32(a.v)))}; }
inline F32 high_f16(I32 a) { return {f16_to_f32(vshrn_n_u32(vreinterpretq_u32_s32(a.v), 16))}; }
inline void gather_words(const std::uint8_t* p, std::int64_t stride, I32 (&word)[4]) {
  uint32x4_t row[4], column[4];
  for (int r = 0; r < 4; ++r) row[r] = vreinterpretq_u32_u8(vld1q_u8(p + r * stride));
  transpose(row, column);
  for (int i = 0; i < 4; ++i) word[i].v = vreinterpretq_s32_u32(column[i]);
}
inline F32 to_f32(I32 a) { return {vcvtq_f32_s32(a.v)}; }

inline float e4m3_to_f32(std::uint8_t b) {
  if ((b & 0x7f) == 0x7f) return __builtin_nanf("");
  return f16_to_f32(static_cast<std::uint16_t>((b & 0x80) << 8 | (b & 0x7f) << 7)) * 256.0f;
}

// As float16 with the bias of e4m3: sign extension leaves a copy of the sign beside the exponent.
inline void load_e4m3(const std::uint8_t* p, F32 (&w)[4]) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  const uint16x8_t bits = vdupq_n_u16(0xbf80);
  const uint16x8_t low = vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_low_s8(bytes), 7)), bits);
  const uint16x8_t high = vandq_u16(vreinterpretq_u16_s16(vshll_high_n_s8(bytes, 7)), bits);
  const float32x4_t unit = vdupq_n_f32(256.0f);
  w[0].v = vmulq_f32(f16_to_f32(vget_low_u16(low)), unit);
  w[1].v = vmulq_f32(vcvt_high_f32_f16(vreinterpretq_f16_u16(low)), unit);
  w[2].v = vmulq_f32(f16_to_f32(vget_low_u16(high)), unit);
  w[3].v = vmulq_f32(vcvt_high_f32_f16(vreinterpretq_f16_u16(high)), unit);
}

// As bfloat16: the upper byte, sign and exponent + 120 without its last bit, comes from the upper nibble; the
// lower byte is the lower nibble moved up.
inline void load_normal_e4m3(const std::uint8_t* p, F32 (&w)[4]) {
  static constexpr std::uint8_t kUppers[16] = {60,  61,  62,  63,  64,  65,  66,  67,
                                               188, 189, 190, 191, 192, 193, 194, 195};
  const uint8x16_t bytes = vld1q_u8(p);
  const uint8x16_t upper = vqtbl1q_u8(vld1q_u8(kUppers), vshrq_n_u8(bytes, 4));
  const uint8x16_t lower = vshlq_n_u8(bytes, 4);
  const uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(lower, upper));
  const uint16x8_t second = vreinterpretq_u16_u8(vzip2q_u8(lower, upper));
  const uint16x8_t zero = vdupq_n_u16(0);
  w[0].v = vreinterpretq_f32_u16(vzip1q_u16(zero, first));
  w[1].v = vreinterpretq_f32_u16(vzip2q_u16(zero, first));
  w[2].v = vreinterpretq_f32_u16(vzip1q_u16(zero, second));
  w[3].v = vreinterpretq_f32_u16(vzip2q_u16(zero, second));
}

inline F32 load_spread(const float* p, int i) { return F32::load(p + 4 * i); }

struct E4m3Nans {
  uint8x16_t largest = vdupq_n_u8(0);   // of the magnitudes
  bool note(const std::uint8_t* p, std::int64_t n) {
    uint8x16_t least = vdupq_n_u8(0x7f);
    std::int64_t i = 0;
    for (; i + 16 <= n; i += 16) note_16(vld1q_u8(p + i), least);
    if (i < n) {
      std::uint8_t rest[16];
      std::memset(rest, 8, sizeof rest);   // the least normal number
      std::memcpy(rest, p + i, static_cast<std::size_t>(n - i));
      note_16(vld1q_u8(rest), least);
    }
    return vminvq_u8(least) > 7;
  }
  void note_16(uint8x16_t bytes, uint8x16_t& least) {
    const uint8x16_t magnitude = vandq_u8(bytes, vdupq_n_u8(0x7f));
    largest = vmaxq_u8(largest, magnitude);
    least = vminq_u8(least, magnitude);
  }
  bool any() const { return vmaxvq_u8(largest) == 0x7f; }
};

inline constexpr float kE4m3Unit = 256.0f;
// The e4m3 numbers in the upper bytes, in units of 256, NaN as NaN.
inline float32x4_t e4m3_to_f32(uint16x4_t upper_bytes) {
  const uint16x4_t wide = vreinterpret_u16_s16(vshr_n_s16(vreinterpret_s16_u16(upper_bytes), 1));
  const uint16x4_t largest = vdup_n_u16(0x3f80);
  const uint16x4_t nan = vceq_u16(vand_u16(wide, largest), largest);
  return f16_to_f32(vorr_u16(vand_u16(wide, vdup_n_u16(0xbf80)), nan));
}
inline void e4m3_pair_to_f32(uint16x4_t pair, F32& first, F32& second) {
  first.v = e4m3_to_f32(vshl_n_u16(pair, 8));
  second.v = e4m3_to_f32(pair);
}

inline void gather_e4m3(const std::uint8_t* p, std::int64_t stride, F32 (&w)[2]) {
  e4m3_pair_to_f32(gather_u16(p, stride), w[0], w[1]);
}
inline void gather_e4m3(const std::uint8_t* p, std::int64_t stride, F32 (&w)[4]) {
  const uint32x4_t four = gather_u32(p, stride);
  e4m3_pair_to_f32(vmovn_u32(four), w[0], w[1]);
  e4m3_pair_to_f32(vshrn_n_u32(four, 16), w[2], w[3]);
}

inline float e8m0_to_f32(std::uint8_t b) {
  const std::uint32_t bits = b == 0 ? 0x00400000u : b == 255 ? 0x7fc00000u : static_cast<std::uint32_t>(b) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline F32 e8m0_values(uint32x4_t bytes) {
  const uint32x4_t nan = vceqq_u32(bytes, vdupq_n_u32(255));
  const uint32x4_t value = vmaxq_u32(vshlq_n_u32(bytes, 23), vdupq_n_u32(0x00400000));
  return {vreinterpretq_f32_u32(vorrq_u32(value, nan))};
}

inline F32 gather_e8m0(const std::uint8_t* p, std::int64_t stride) {
  uint32x4_t b = vdupq_n_u32(p[0]);
  b = vsetq_lane_u32(p[stride], b, 1);
  b = vsetq_lane_u32(p[2 * stride], b, 2);
  return e8m0_values(vsetq_lane_u32(p[3 * stride], b, 3));
}
inline void gather_e8m0(const std::uint8_t* p, std::int64_t stride, F32 (&w)[4]) {
  const uint32x4_t four = gather_u32(p, stride), byte = vdupq_n_u32(0xff);
  w[0] = e8m0_values(vandq_u32(four, byte));
  w[1] = e8m0_values(vandq_u32(vshrq_n_u32(four, 8), byte));
  w[2] = e8m0_values(vandq_u32(vshrq_n_u32(four, 16), byte));
  w[3] = e8m0_values(vshrq_n_u32(four, 24));
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace ft::isa_neon
