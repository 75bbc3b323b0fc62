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
inline F32 sqrt(F32 a) { return {std::sqrt(a.v)}; }
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

// 32 bytes: the codes of 32 columns of a row, or the int8 activations that meet them.
struct Bytes32 {
  std::uint8_t v[32];

  static Bytes32 load(const void* p) {
    Bytes32 r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
  }
  void store(std::uint8_t* p) const { std::memcpy(p, v, sizeof v); }
  // 16 bytes to 32 numbers 0..15: the low nibbles, then the high ones.
  static Bytes32 load_nibbles(const std::uint8_t* p) {
    Bytes32 r;
    for (int i = 0; i < 16; ++i) {
      r.v[i] = p[i] & 0x0f;
      r.v[i + 16] = p[i] >> 4;
    }
    return r;
  }
  // Bytes 0..15 of a table, by numbers 0..15.
  static Bytes32 lookup(const std::uint8_t (&table)[16], Bytes32 index) {
    Bytes32 r;
    for (int i = 0; i < 32; ++i) r.v[i] = table[index.v[i]];
    return r;
  }
  // Every byte moved up by `up` places (down if negative), then masked. Bits that come from a neighbouring
  // byte must not be in the mask.
  Bytes32 bits(int up, int mask) const {
    Bytes32 r;
    for (int i = 0; i < 32; ++i) {
      r.v[i] = static_cast<std::uint8_t>((up < 0 ? v[i] >> -up : v[i] << up) & mask);
    }
    return r;
  }
  // Quarters of 8 bytes: 0 2 1 3.
  Bytes32 swap_quarters() const {
    Bytes32 r = *this;
    std::memcpy(r.v + 8, v + 16, 8);
    std::memcpy(r.v + 16, v + 8, 8);
    return r;
  }
  // Elements 0 2 4 .. 30 1 3 5 .. 31, and back.
  Bytes32 evens_first() const {
    Bytes32 r;
    for (int i = 0; i < 32; ++i) r.v[i] = v[i < 16 ? 2 * i : 2 * i - 31];
    return r;
  }
  Bytes32 interleave_halves() const {
    Bytes32 r;
    for (int i = 0; i < 32; ++i) r.v[i] = v[i / 2 + i % 2 * 16];
    return r;
  }
};

inline Bytes32 operator|(Bytes32 a, Bytes32 b) {
  for (int i = 0; i < 32; ++i) a.v[i] |= b.v[i];
  return a;
}

// A panel holds 32 columns of kWidth rows so that a lane is a row: 8 groups of kWidth * 4 bytes, in
// group g the codes 4g..4g+3 of each row.
inline constexpr int kPanelBytes = F32::kWidth * 32;

inline void store_panel(const Bytes32 (&rows)[F32::kWidth], std::uint8_t* panel) {
  std::memcpy(panel, rows[0].v, 32);
}

struct PanelRows {   // a panel, in registers
  Bytes32 v;
  static PanelRows load(const std::uint8_t* panel) { return {Bytes32::load(panel)}; }
};

// Products of 32 codes with 32 int8 activations in [-127, 127], added up within each quarter of 8 or more
// finely; the sums are exact.
struct Partial {
  std::int32_t quarter[4];
};

// The sums of kWidth rows, lane r for p[r], and what their arithmetic needs to know: no code has a
// magnitude above kMax. `whole`: of all 32 columns. `halves`: of columns 0..15 and of 16..31.
// `alternate`: of quarters 0 and 2, and of 1 and 3.
template <class Product>
struct Sums {
  static void whole(const Partial (&p)[F32::kWidth], I32 (&out)[1]) {
    const auto& q = p[0].quarter;
    out[0].v = q[0] + q[1] + q[2] + q[3];
  }
  static void halves(const Partial (&p)[F32::kWidth], I32 (&out)[2]) {
    const auto& q = p[0].quarter;
    out[0].v = q[0] + q[1];
    out[1].v = q[2] + q[3];
  }
  static void alternate(const Partial (&p)[F32::kWidth], I32 (&out)[2]) {
    const auto& q = p[0].quarter;
    out[0].v = q[0] + q[2];
    out[1].v = q[1] + q[3];
  }
  // out[i], lane r = panel row r . x over the i-th of kParts equal ranges of columns.
  template <int kParts>
  static void panel(const PanelRows& w, const std::int8_t* x, I32 (&out)[kParts]) {
    const Partial p = Product::dot(w.v, Bytes32::load(x));
    for (int i = 0; i < kParts; ++i) out[i].v = 0;
    for (int i = 0; i < 4; ++i) out[i * kParts / 4].v += p.quarter[i];
  }
};

template <class Code>
Partial products(const Bytes32& w, const Bytes32& x) {
  Partial p = {};
  for (int i = 0; i < 32; ++i) {
    const std::int32_t code = static_cast<Code>(w.v[i]);
    p.quarter[i / 8] += code * static_cast<std::int8_t>(x.v[i]);
  }
  return p;
}

template <int kMaxCode>   // codes 0..kMaxCode, at most 64
struct Unsigned {
  static constexpr int kMax = kMaxCode;
  static Partial dot(Bytes32 w, Bytes32 x) { return products<std::uint8_t>(w, x); }
};

struct Signed {   // codes -128..127
  static constexpr int kMax = 128;
  static Partial dot(Bytes32 w, Bytes32 x) { return products<std::int8_t>(w, x); }
};

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

inline void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace ft::isa_scalar
