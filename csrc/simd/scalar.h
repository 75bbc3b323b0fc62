// The primitives in plain C++: the reference of every other instruction set, and what a host without
// a better one runs. What a primitive means is said here; the other headers only say how.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace ft::isa_scalar {

inline float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1fu;
  const std::uint32_t mantissa = h & 0x3ffu;
  float value;
  if (exponent == 0) {   // zero and subnormals: mantissa * 2^-24, exact in float32
    value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  const std::uint32_t bits =
      sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint16_t load_u16(const void* p) {
  std::uint16_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// kWidth float32 lanes.
struct F32 {
  static constexpr int kWidth = 1;
  float v;

  static F32 zero() { return {0.0f}; }
  static F32 broadcast(float x) { return {x}; }
  static F32 load(const float* p) { return {*p}; }
  static F32 load_f16(const void* p) { return {f16_to_f32(load_u16(p))}; }
  static F32 load_bf16(const void* p) {
    const std::uint32_t bits = static_cast<std::uint32_t>(load_u16(p)) << 16;
    F32 r;
    std::memcpy(&r.v, &bits, sizeof r.v);
    return r;
  }
  // Lanes [0, n), 0 < n < kWidth; the others are zero, and their memory is not touched.
  static F32 load_partial(const float* p, int) { return load(p); }
  static F32 load_f16_partial(const void* p, int) { return load_f16(p); }
  static F32 load_bf16_partial(const void* p, int) { return load_bf16(p); }
  static F32 load_u8(const std::uint8_t* p) { return {static_cast<float>(*p)}; }
  // Lane r is the float16 at p + r * stride.
  static F32 gather_f16(const std::uint8_t* p, std::int64_t) { return load_f16(p); }

  void store(float* p) const { *p = v; }
  void store_partial(float* p, int) const { *p = v; }
};

inline F32 operator+(F32 a, F32 b) { return {a.v + b.v}; }
inline F32 operator-(F32 a, F32 b) { return {a.v - b.v}; }
inline F32 operator*(F32 a, F32 b) { return {a.v * b.v}; }
inline F32 operator/(F32 a, F32 b) { return {a.v / b.v}; }
// a * b + c. Rounded once where the instruction set can do that, else twice.
inline F32 fma(F32 a, F32 b, F32 c) { return {a.v * b.v + c.v}; }
// As the x86 instructions: b if either is NaN.
inline F32 max(F32 a, F32 b) { return {a.v > b.v ? a.v : b.v}; }
inline F32 min(F32 a, F32 b) { return {a.v < b.v ? a.v : b.v}; }
inline F32 abs(F32 a) { return {std::fabs(a.v)}; }
inline F32 round(F32 a) { return {std::nearbyint(a.v)}; }   // to nearest, ties to even
// 2^n for integral n in [-126, 127].
inline F32 pow2(F32 n) {
  const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<std::int32_t>(n.v) + 127) << 23;
  F32 r;
  std::memcpy(&r.v, &bits, sizeof r.v);
  return r;
}
// The largest power of two that is not above |a|; 0 below the normal numbers.
inline F32 power_of_two_below(F32 a) {
  std::uint32_t bits;
  std::memcpy(&bits, &a.v, sizeof bits);
  bits &= 0x7f800000u;
  std::memcpy(&a.v, &bits, sizeof bits);
  return a;
}
// a where x is not NaN, x where it is.
inline F32 keep_nan(F32 a, F32 x) { return {x.v == x.v ? a.v : x.v}; }
inline float hsum(F32 a) { return a.v; }
inline float hmax(F32 a) { return a.v; }
// y[i] += lane i, in float64.
inline void add_to_doubles(F32 a, double* y) { *y += static_cast<double>(a.v); }

// As many int32 lanes.
struct I32 {
  std::int32_t v;
  static I32 broadcast(std::int32_t x) { return {x}; }
};

inline I32 operator-(I32 a, I32 b) { return {a.v - b.v}; }
inline I32 operator&(I32 a, I32 b) { return {a.v & b.v}; }
inline I32 operator|(I32 a, I32 b) { return {a.v | b.v}; }
inline I32 shift_right(I32 a, int n) {   // zeros come in
  return {static_cast<std::int32_t>(static_cast<std::uint32_t>(a.v) >> n)};
}
inline I32 unsigned_byte(I32 a, int i) { return {a.v >> 8 * i & 0xff}; }   // the i-th from below
inline I32 signed_byte(I32 a, int i) { return {static_cast<std::int8_t>(a.v >> 8 * i & 0xff)}; }
inline F32 low_f16(I32 a) { return {f16_to_f32(static_cast<std::uint16_t>(a.v & 0xffff))}; }
inline F32 high_f16(I32 a) { return low_f16(shift_right(a, 16)); }
// Lane r of word[i] is the i-th 4-byte word at p + r * stride.
inline void gather_words(const std::uint8_t* p, std::int64_t, I32 (&word)[4]) {
  std::memcpy(&word[0].v, p, 4);
  std::memcpy(&word[1].v, p + 4, 4);
  std::memcpy(&word[2].v, p + 8, 4);
  std::memcpy(&word[3].v, p + 12, 4);
}
inline F32 to_f32(I32 a) { return {static_cast<float>(a.v)}; }

// FP8 e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f and 0xff are NaN, there is no infinity.
inline float e4m3_to_f32(std::uint8_t b) {
  if ((b & 0x7f) == 0x7f) return __builtin_nanf("");
  return f16_to_f32(static_cast<std::uint16_t>((b & 0x80) << 8 | (b & 0x7f) << 7)) * 256.0f;
}

// 4 * kWidth e4m3 numbers, in the order of load_spread; NaN comes out as a finite number. The normal ones
// alone (2^-6 and above) are quicker to have.
inline void load_e4m3(const std::uint8_t* p, F32 (&w)[4]) {
  for (int i = 0; i < 4; ++i) {
    w[i].v = f16_to_f32(static_cast<std::uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)) * 256.0f;
  }
}
inline void load_normal_e4m3(const std::uint8_t* p, F32 (&w)[4]) { load_e4m3(p, w); }
inline F32 load_spread(const float* p, int i) { return {p[i]}; }   // vector i of the four

struct E4m3Nans {
  bool seen = false;
  // Whether all n numbers are normal, NaN included; the NaNs are kept in mind.
  bool note(const std::uint8_t* p, std::int64_t n) {
    bool normal = true;
    for (std::int64_t i = 0; i < n; ++i) {
      seen |= (p[i] & 0x7f) == 0x7f;
      normal &= (p[i] & 0x7f) > 7;
    }
    return normal;
  }
  bool any() const { return seen; }
};

inline constexpr float kE4m3Unit = 256.0f;
// Lane r of w[i] is the e4m3 number at p + r * stride + i, in units of kE4m3Unit; NaN stays NaN.
template <int N>   // 2 or 4
void gather_e4m3(const std::uint8_t* p, std::int64_t, F32 (&w)[N]) {
  for (int i = 0; i < N; ++i) w[i].v = e4m3_to_f32(p[i]) / kE4m3Unit;
}

// e8m0: 2^(b - 127), 255 is NaN.
inline float e8m0_to_f32(std::uint8_t b) {
  const std::uint32_t bits = b == 0 ? 0x00400000u : b == 255 ? 0x7fc00000u : static_cast<std::uint32_t>(b) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
// Lane r is the e8m0 number at p + r * stride.
inline F32 gather_e8m0(const std::uint8_t* p, std::int64_t) { return {e8m0_to_f32(*p)}; }
// Lane r of w[i] is the one at p + r * stride + i.
inline void gather_e8m0(const std::uint8_t* p, std::int64_t, F32 (&w)[4]) {
  for (int i = 0; i < 4; ++i) w[i].v = e8m0_to_f32(p[i]);
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace ft::isa_scalar
