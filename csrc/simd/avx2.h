// The primitives with AVX2, FMA and F16C, for every instruction set that has these. Their meaning: simd/scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace ft::FT_ISA_NAMESPACE {

inline std::uint16_t load_u16(const void* p) {
  std::uint16_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline float f16_to_f32(std::uint16_t h) { return _cvtsh_ss(h); }

struct F32 {
  static constexpr int kWidth = 8;
  __m256 v;

  static F32 zero() { return {_mm256_setzero_ps()}; }
  static F32 broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static F32 load_f16(const void* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
  }
  static F32 load_bf16(const void* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static F32 load_partial(const float* p, int n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
  static F32 load_f16_partial(const void* p, int n) {
    std::uint16_t lanes[8] = {};
    std::memcpy(lanes, p, static_cast<std::size_t>(n) * 2);
    return load_f16(lanes);
  }
  static F32 load_bf16_partial(const void* p, int n) {
    std::uint16_t lanes[8] = {};
    std::memcpy(lanes, p, static_cast<std::size_t>(n) * 2);
    return load_bf16(lanes);
  }
  static F32 load_u8(const std::uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_cvtepi32_ps(wide)};
  }
  static F32 gather_f16(const std::uint8_t* p, std::int64_t stride) {
    const std::uint8_t* q = p + 4 * stride;   // two chains of inserts
    __m128i low = _mm_cvtsi32_si128(load_u16(p));
    __m128i high = _mm_cvtsi32_si128(load_u16(q));
    low = _mm_insert_epi16(low, load_u16(p + stride), 1);
    high = _mm_insert_epi16(high, load_u16(q + stride), 1);
    low = _mm_insert_epi16(low, load_u16(p + 2 * stride), 2);
    high = _mm_insert_epi16(high, load_u16(q + 2 * stride), 2);
    low = _mm_insert_epi16(low, load_u16(p + 3 * stride), 3);
    high = _mm_insert_epi16(high, load_u16(q + 3 * stride), 3);
    return {_mm256_cvtph_ps(_mm_unpacklo_epi64(low, high))};
  }

  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store_partial(float* p, int n) const { _mm256_maskstore_ps(p, first_lanes(n), v); }
};

inline F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F32 round(F32 a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F32 pow2(F32 n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
}
inline F32 power_of_two_below(F32 a) {
  return {_mm256_and_ps(a.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)))};
}
inline F32 keep_nan(F32 a, F32 x) {
  return {_mm256_blendv_ps(a.v, x.v, _mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q))};
}
inline float hsum(F32 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float hmax(F32 a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline void add_to_doubles(F32 a, double* y) {
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a.v));
  const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(a.v, 1));
  _mm256_storeu_pd(y, _mm256_add_pd(_mm256_loadu_pd(y), low));
  _mm256_storeu_pd(y + 4, _mm256_add_pd(_mm256_loadu_pd(y + 4), high));
}

struct I32 {
  __m256i v;
  static I32 broadcast(std::int32_t x) { return {_mm256_set1_epi32(x)}; }
};

inline I32 operator-(I32 a, I32 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline I32 operator&(I32 a, I32 b) { return {_mm256_and_si256(a.v, b.v)}; }
inline I32 operator|(I32 a, I32 b) { return {_mm256_or_si256(a.v, b.v)}; }
inline I32 shift_right(I32 a, int n) { return {_mm256_srli_epi32(a.v, n)}; }
inline I32 unsigned_byte(I32 a, int i) {
  return {_mm256_srli_epi32(_mm256_slli_epi32(a.v, 24 - 8 * i), 24)};
}
inline I32 signed_byte(I32 a, int i) {
  return {_mm256_srai_epi32(_mm256_slli_epi32(a.v, 24 - 8 * i), 24)};
}
inline F32 high_f16(I32 a) {
  const __m256i high = _mm256_srli_epi32(a.v, 16);
  const __m128i eight = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  return {_mm256_cvtph_ps(eight)};
}
inline F32 low_f16(I32 a) { return high_f16({_mm256_slli_epi32(a.v, 16)}); }
inline void gather_words(const std::uint8_t* p, std::int64_t stride, I32 (&word)[4]) {
  __m256i row[4];   // rows r and r + 4
  for (int r = 0; r < 4; ++r) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + r * stride));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + (r + 4) * stride));
    row[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  const __m256i a = _mm256_unpacklo_epi32(row[0], row[1]), b = _mm256_unpacklo_epi32(row[2], row[3]);
  const __m256i c = _mm256_unpackhi_epi32(row[0], row[1]), d = _mm256_unpackhi_epi32(row[2], row[3]);
  word[0].v = _mm256_unpacklo_epi64(a, b);
  word[1].v = _mm256_unpackhi_epi64(a, b);
  word[2].v = _mm256_unpacklo_epi64(c, d);
  word[3].v = _mm256_unpackhi_epi64(c, d);
}
inline F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps(a.v)}; }

inline float e4m3_to_f32(std::uint8_t b) {
  if ((b & 0x7f) == 0x7f) return __builtin_nanf("");
  return f16_to_f32(static_cast<std::uint16_t>((b & 0x80) << 8 | (b & 0x7f) << 7)) * 256.0f;
}

// As float16 with the bias of e4m3: sign extension leaves a copy of the sign beside the exponent.
inline __m256i e4m3_to_wide_f16(const std::uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
}

inline void load_e4m3(const std::uint8_t* p, F32 (&w)[4]) {
  const __m256i a = e4m3_to_wide_f16(p), b = e4m3_to_wide_f16(p + 16);
  const __m256i low = _mm256_unpacklo_epi64(a, b), high = _mm256_unpackhi_epi64(a, b);
  const __m256 unit = _mm256_set1_ps(256.0f);
  w[0].v = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(low)), unit);
  w[1].v = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(high)), unit);
  w[2].v = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(low, 1)), unit);
  w[3].v = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(high, 1)), unit);
}

// As bfloat16: the upper byte, sign and exponent + 120 without its last bit, comes from the upper nibble; the
// lower byte is the lower nibble moved up.
inline void load_normal_e4m3(const std::uint8_t* p, F32 (&w)[4]) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i nibble = _mm256_set1_epi8(0x0f);
  const __m256i uppers = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      60, 61, 62, 63, 64, 65, 66, 67, -68, -67, -66, -65, -64, -63, -62, -61));
  const __m256i upper = _mm256_shuffle_epi8(uppers, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble));
  const __m256i lower = _mm256_slli_epi16(_mm256_and_si256(bytes, nibble), 4);
  const __m256i first = _mm256_unpacklo_epi8(lower, upper), second = _mm256_unpackhi_epi8(lower, upper);
  const __m256i zero = _mm256_setzero_si256();
  w[0].v = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, first));
  w[1].v = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, first));
  w[2].v = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, second));
  w[3].v = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, second));
}

inline F32 load_spread(const float* p, int i) {   // columns 0..3 and 16..19, 4..7 and 20..23, ...
  const __m256 low = _mm256_castps128_ps256(_mm_loadu_ps(p + 4 * i));
  return {_mm256_insertf128_ps(low, _mm_loadu_ps(p + 16 + 4 * i), 1)};
}

struct E4m3Nans {
  __m256i largest = _mm256_setzero_si256();   // of the magnitudes
  bool note(const std::uint8_t* p, std::int64_t n) {
    __m256i least = _mm256_set1_epi8(0x7f);
    std::int64_t i = 0;
    for (; i + 32 <= n; i += 32) note_32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i)), least);
    if (i < n) {
      std::uint8_t rest[32] = {};   // zeros: not normal
      std::memcpy(rest, p + i, static_cast<std::size_t>(n - i));
      note_32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rest)), least);
    }
    return _mm256_movemask_epi8(_mm256_cmpgt_epi8(_mm256_set1_epi8(8), least)) == 0;
  }
  void note_32(__m256i bytes, __m256i& least) {
    const __m256i magnitude = _mm256_and_si256(bytes, _mm256_set1_epi8(0x7f));
    largest = _mm256_max_epu8(largest, magnitude);
    least = _mm256_min_epu8(least, magnitude);
  }
  bool any() const {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(0x7f))) != 0;
  }
};

inline constexpr float kE4m3Unit = 256.0f;
// 16 e4m3 numbers as float16 in units of 256, NaN as NaN.
inline __m256i e4m3_to_f16(__m128i bytes) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  const __m256i largest = _mm256_set1_epi16(0x3f80);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(wide, largest), largest);
  return _mm256_or_si256(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbf80))), nan);
}

inline void gather_e4m3(const std::uint8_t* p, std::int64_t stride, F32 (&w)[2]) {
  const std::uint8_t* q = p + 4 * stride;
  __m128i low = _mm_cvtsi32_si128(load_u16(p));
  __m128i high = _mm_cvtsi32_si128(load_u16(q));
  low = _mm_insert_epi16(low, load_u16(p + stride), 1);
  high = _mm_insert_epi16(high, load_u16(q + stride), 1);
  low = _mm_insert_epi16(low, load_u16(p + 2 * stride), 2);
  high = _mm_insert_epi16(high, load_u16(q + 2 * stride), 2);
  low = _mm_insert_epi16(low, load_u16(p + 3 * stride), 3);
  high = _mm_insert_epi16(high, load_u16(q + 3 * stride), 3);
  const __m128i split = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  const __m256i half = e4m3_to_f16(_mm_shuffle_epi8(_mm_unpacklo_epi64(low, high), split));
  w[0].v = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
  w[1].v = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
}

inline std::int32_t load_i32(const void* p) {
  std::int32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline __m128i gather_4(const std::uint8_t* p, std::int64_t stride) {
  const __m128i a = _mm_insert_epi32(_mm_cvtsi32_si128(load_i32(p)), load_i32(p + stride), 1);
  const __m128i b =
      _mm_insert_epi32(_mm_cvtsi32_si128(load_i32(p + 2 * stride)), load_i32(p + 3 * stride), 1);
  return _mm_unpacklo_epi64(a, b);
}

inline void gather_e4m3(const std::uint8_t* p, std::int64_t stride, F32 (&w)[4]) {
  const __m128i split = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i low = _mm_shuffle_epi8(gather_4(p, stride), split);
  const __m128i high = _mm_shuffle_epi8(gather_4(p + 4 * stride, stride), split);
  const __m256i first = e4m3_to_f16(_mm_unpacklo_epi32(low, high));
  const __m256i second = e4m3_to_f16(_mm_unpackhi_epi32(low, high));
  w[0].v = _mm256_cvtph_ps(_mm256_castsi256_si128(first));
  w[1].v = _mm256_cvtph_ps(_mm256_extracti128_si256(first, 1));
  w[2].v = _mm256_cvtph_ps(_mm256_castsi256_si128(second));
  w[3].v = _mm256_cvtph_ps(_mm256_extracti128_si256(second, 1));
}

inline float e8m0_to_f32(std::uint8_t b) {
  const std::uint32_t bits = b == 0 ? 0x00400000u : b == 255 ? 0x7fc00000u : static_cast<std::uint32_t>(b) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline __m256i e8m0_values(__m256i bytes) {   // of 8 int32
  const __m256i nan = _mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(255));
  const __m256i value = _mm256_max_epi32(_mm256_slli_epi32(bytes, 23), _mm256_set1_epi32(0x00400000));
  return _mm256_or_si256(value, nan);
}

inline void gather_e8m0(const std::uint8_t* p, std::int64_t stride, F32 (&w)[4]) {
  const __m128i split = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i low = _mm_shuffle_epi8(gather_4(p, stride), split);
  const __m128i high = _mm_shuffle_epi8(gather_4(p + 4 * stride, stride), split);
  const __m128i first = _mm_unpacklo_epi32(low, high), second = _mm_unpackhi_epi32(low, high);
  w[0].v = _mm256_castsi256_ps(e8m0_values(_mm256_cvtepu8_epi32(first)));
  w[1].v = _mm256_castsi256_ps(e8m0_values(_mm256_cvtepu8_epi32(_mm_srli_si128(first, 8))));
  w[2].v = _mm256_castsi256_ps(e8m0_values(_mm256_cvtepu8_epi32(second)));
  w[3].v = _mm256_castsi256_ps(e8m0_values(_mm256_cvtepu8_epi32(_mm_srli_si128(second, 8))));
}

inline F32 gather_e8m0(const std::uint8_t* p, std::int64_t stride) {
  const std::uint8_t* q = p + 4 * stride;
  __m128i low = _mm_cvtsi32_si128(p[0]);
  __m128i high = _mm_cvtsi32_si128(q[0]);
  low = _mm_insert_epi8(low, p[stride], 1);
  high = _mm_insert_epi8(high, q[stride], 1);
  low = _mm_insert_epi8(low, p[2 * stride], 2);
  high = _mm_insert_epi8(high, q[2 * stride], 2);
  low = _mm_insert_epi8(low, p[3 * stride], 3);
  high = _mm_insert_epi8(high, q[3 * stride], 3);
  return {_mm256_castsi256_ps(e8m0_values(_mm256_cvtepu8_epi32(_mm_unpacklo_epi32(low, high))))};
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace ft::FT_ISA_NAMESPACE
