// The primitives with AVX2, FMA and F16C. Their meaning: simd/scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace ft::isa_avx2 {

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
inline F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.v)}; }
inline F32 round(F32 a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F32 pow2(F32 n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
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

struct I32 {
  __m256i v;
  static I32 broadcast(std::int32_t x) { return {_mm256_set1_epi32(x)}; }
};

inline I32 operator-(I32 a, I32 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps(a.v)}; }

struct Bytes32 {
  __m256i v;

  static Bytes32 load(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
  static Bytes32 load_nibbles(const std::uint8_t* p) {
    const __m256i twice =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i shifted = _mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    return {_mm256_and_si256(shifted, _mm256_set1_epi8(0x0f))};
  }
};

inline constexpr int kPanelBytes = F32::kWidth * 32;

inline void store_panel(const Bytes32 (&rows)[8], std::uint8_t* panel) {   // transposes 8x8 int32
  __m256i pair[8], quad[8];
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_epi32(rows[i].v, rows[i + 1].v);
    pair[i + 1] = _mm256_unpackhi_epi32(rows[i].v, rows[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4) {
    quad[i] = _mm256_unpacklo_epi64(pair[i], pair[i + 2]);
    quad[i + 1] = _mm256_unpackhi_epi64(pair[i], pair[i + 2]);
    quad[i + 2] = _mm256_unpacklo_epi64(pair[i + 1], pair[i + 3]);
    quad[i + 3] = _mm256_unpackhi_epi64(pair[i + 1], pair[i + 3]);
  }
  __m256i* out = reinterpret_cast<__m256i*>(panel);
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_si256(out + i, _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x20));
    _mm256_storeu_si256(out + i + 4, _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x31));
  }
}

inline __m256i broadcast_4(const std::int8_t* p) {
  std::int32_t four;
  std::memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}

inline __m256i join_halves(__m256i rows0123, __m256i rows4567) {
  return _mm256_add_epi32(_mm256_permute2x128_si256(rows0123, rows4567, 0x20),
                          _mm256_permute2x128_si256(rows0123, rows4567, 0x31));
}

// All sums of 8 products of a code <= 15 fit int16: 16 * 15 * 127 = 30480.
struct UnsignedNarrow {
  static I32 dot(Bytes32 w, Bytes32 x) {
    return {_mm256_madd_epi16(_mm256_maddubs_epi16(w.v, x.v), _mm256_set1_epi16(1))};
  }
  static __m256i pair_up(__m256i a, __m256i b) {   // hadd in two operations instead of three
    return _mm256_madd_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(1));
  }
  static I32 sum_rows(const I32 (&p)[8]) {
    return {join_halves(pair_up(pair_up(p[0].v, p[1].v), pair_up(p[2].v, p[3].v)),
                        pair_up(pair_up(p[4].v, p[5].v), pair_up(p[6].v, p[7].v)))};
  }
  template <int T>
  static void panel_dot(const std::uint8_t* panel, const std::int8_t* const (&x)[T], I32 (&out)[T]) {
    __m256i sum[T];
    for (int t = 0; t < T; ++t) sum[t] = _mm256_setzero_si256();
    for (int g = 0; g < 8; ++g) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel) + g);
      for (int t = 0; t < T; ++t) {
        sum[t] = _mm256_add_epi16(sum[t], _mm256_maddubs_epi16(w, broadcast_4(x[t] + 4 * g)));
      }
    }
    for (int t = 0; t < T; ++t) out[t].v = _mm256_madd_epi16(sum[t], _mm256_set1_epi16(1));
  }
};

// The sign of the code moves to the activation: |w| * (x * sign w). 2 * 128 * 127 fits int16.
struct SignedWide {
  static __m256i products(__m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  static I32 dot(Bytes32 w, Bytes32 x) { return {products(w.v, x.v)}; }
  static I32 sum_rows(const I32 (&p)[8]) {
    return {join_halves(
        _mm256_hadd_epi32(_mm256_hadd_epi32(p[0].v, p[1].v), _mm256_hadd_epi32(p[2].v, p[3].v)),
        _mm256_hadd_epi32(_mm256_hadd_epi32(p[4].v, p[5].v), _mm256_hadd_epi32(p[6].v, p[7].v)))};
  }
  template <int T>
  static void panel_dot(const std::uint8_t* panel, const std::int8_t* const (&x)[T], I32 (&out)[T]) {
    for (int t = 0; t < T; ++t) out[t].v = _mm256_setzero_si256();
    for (int g = 0; g < 8; ++g) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel) + g);
      for (int t = 0; t < T; ++t) {
        out[t].v = _mm256_add_epi32(out[t].v, products(w, broadcast_4(x[t] + 4 * g)));
      }
    }
  }
};

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace ft::isa_avx2
