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
inline F32 sqrt(F32 a) { return {std::sqrt(a.v)}; }
inline F32 round(F32 a) { return {std::nearbyint(a.v)}; }   // to nearest, ties to even
// 2^n for integral n in [-126, 127].
inline F32 pow2(F32 n) {
  const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<std::int32_t>(n.v) + 127) << 23;
  F32 r;
  std::memcpy(&r.v, &bits, sizeof r.v);
  return r;
}
// a where x is not NaN, x where it is.
inline F32 keep_nan(F32 a, F32 x) { return {x.v == x.v ? a.v : x.v}; }
inline float hsum(F32 a) { return a.v; }
inline float hmax(F32 a) { return a.v; }

// As many int32 lanes.
struct I32 {
  std::int32_t v;
  static I32 broadcast(std::int32_t x) { return {x}; }
};

inline I32 operator-(I32 a, I32 b) { return {a.v - b.v}; }
inline F32 to_f32(I32 a) { return {static_cast<float>(a.v)}; }

// 32 bytes: the codes of one block, or the int8 activations that meet them.
struct Bytes32 {
  std::uint8_t v[32];

  static Bytes32 load(const void* p) {
    Bytes32 r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
  }
  // 16 bytes to 32 numbers 0..15: the low nibbles, then the high ones.
  static Bytes32 load_nibbles(const std::uint8_t* p) {
    Bytes32 r;
    for (int i = 0; i < 16; ++i) {
      r.v[i] = p[i] & 0x0f;
      r.v[i + 16] = p[i] >> 4;
    }
    return r;
  }
};

// A panel holds one block of kWidth rows so that a lane is a row: 8 groups of kWidth * 4 bytes, in
// group g the codes 4g..4g+3 of each row.
inline constexpr int kPanelBytes = F32::kWidth * 32;

inline void store_panel(const Bytes32 (&rows)[F32::kWidth], std::uint8_t* panel) {
  std::memcpy(panel, rows[0].v, 32);
}

// Exact dot products of codes with int8 activations in [-127, 127], in three steps or with panels:
//   dot(w, x)     partial sums of one block
//   sum_rows(p)   lane r = the sum of the lanes of p[r]
//   panel_dot     out[t], lane r = panel row r . x[t]
struct UnsignedNarrow {   // codes 0..15
  static I32 dot(Bytes32 w, Bytes32 x) {
    std::int32_t sum = 0;
    for (int i = 0; i < 32; ++i) sum += static_cast<std::int32_t>(w.v[i]) * static_cast<std::int8_t>(x.v[i]);
    return {sum};
  }
  static I32 sum_rows(const I32 (&p)[F32::kWidth]) { return p[0]; }
  template <int T>
  static void panel_dot(const std::uint8_t* panel, const std::int8_t* const (&x)[T], I32 (&out)[T]) {
    const Bytes32 w = Bytes32::load(panel);
    for (int t = 0; t < T; ++t) out[t] = dot(w, Bytes32::load(x[t]));
  }
};

struct SignedWide {   // codes -128..127
  static I32 dot(Bytes32 w, Bytes32 x) {
    std::int32_t sum = 0;
    for (int i = 0; i < 32; ++i) {
      sum += static_cast<std::int32_t>(static_cast<std::int8_t>(w.v[i])) * static_cast<std::int8_t>(x.v[i]);
    }
    return {sum};
  }
  static I32 sum_rows(const I32 (&p)[F32::kWidth]) { return p[0]; }
  template <int T>
  static void panel_dot(const std::uint8_t* panel, const std::int8_t* const (&x)[T], I32 (&out)[T]) {
    const Bytes32 w = Bytes32::load(panel);
    for (int t = 0; t < T; ++t) out[t] = dot(w, Bytes32::load(x[t]));
  }
};

inline void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace ft::isa_scalar
