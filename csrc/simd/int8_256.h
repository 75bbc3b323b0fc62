// Products of codes with int8 activations in vectors of 256 bits. Their meaning: simd/scalar_int8.h. What
// differs between instruction sets is how products are added by fours: simd/avx2_int8.h, simd/vnni_int8.h.
#pragma once

#include <concepts>

#include "simd/avx2.h"

namespace ft::FT_ISA_NAMESPACE {

struct Bytes32 {
  __m256i v;

  static Bytes32 load(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
  void store(std::uint8_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static Bytes32 load_nibbles(const std::uint8_t* p) {
    const __m256i twice =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i shifted = _mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    return {_mm256_and_si256(shifted, _mm256_set1_epi8(0x0f))};
  }
  static Bytes32 lookup(const std::uint8_t (&table)[16], Bytes32 index) {
    const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), index.v)};
  }
  Bytes32 bits(int up, int mask) const {
    const __m256i moved = up == 0 ? v : up < 0 ? _mm256_srli_epi16(v, -up) : _mm256_slli_epi16(v, up);
    return {_mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask)))};
  }
  Bytes32 swap_quarters() const { return {_mm256_permute4x64_epi64(v, 0xd8)}; }
  Bytes32 evens_first() const {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    return Bytes32{_mm256_shuffle_epi8(v, order)}.swap_quarters();
  }
  Bytes32 interleave_halves() const {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    return {_mm256_shuffle_epi8(swap_quarters().v, order)};
  }
};

inline Bytes32 operator|(Bytes32 a, Bytes32 b) { return {_mm256_or_si256(a.v, b.v)}; }

inline Bytes32 load_halves(const std::uint8_t* low, const std::uint8_t* high) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
  return {_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1)};
}

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

// Four bytes of each row hold eight codes: two groups.
template <class W>
void store_nibble_panel(const std::uint8_t* p, std::int64_t stride, std::uint8_t* panel) {
  using Order = typename W::Codes::Order;
  I32 word[4];
  gather_words(p, stride, word);
  __m256i* out = reinterpret_cast<__m256i*>(panel);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Bytes32 low = W::decode(Bytes32{word[i].v}.bits(0, 0x0f));
    const Bytes32 high = W::decode(Bytes32{word[i].v}.bits(-4, 0x0f));
    if constexpr (Order::kInterleaved) {   // words low[0] high[0] low[1] high[1], then those of 2 and 3
      const __m256i place = _mm256_broadcastsi128_si256(
          _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
      const __m256i after = _mm256_broadcastsi128_si256(
          _mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1));
      const auto join = [&](__m256i order) {
        return _mm256_or_si256(_mm256_shuffle_epi8(low.v, order),
                               _mm256_slli_epi16(_mm256_shuffle_epi8(high.v, order), 8));
      };
      _mm256_store_si256(out + 2 * i, join(place));
      _mm256_store_si256(out + 2 * i + 1, join(after));
    } else {
      _mm256_store_si256(out + Order::low_group(i), low.v);
      _mm256_store_si256(out + Order::high_group(i), high.v);
    }
  }
}

inline __m256i broadcast_4(const void* p) {
  std::int32_t four;
  std::memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}

struct Partial {   // 8 int32
  __m256i v;
};

template <class Product>
struct Sums {
  static constexpr int kMost = 127 * Product::kMax;   // magnitude of one product
  // Sums of neighbouring int32 lanes of a, then of b, in each half. While the lanes fit int16 that is
  // two operations instead of three.
  template <int kProducts>
  static __m256i pair_up(__m256i a, __m256i b) {
    if constexpr (kProducts * kMost <= 32767) {
      return _mm256_madd_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(1));
    } else {
      return _mm256_hadd_epi32(a, b);
    }
  }
  // Lane r of each half: the sum of that half of p[r], for rows 0..3 and for rows 4..7.
  static void sum_halves(const Partial (&p)[8], __m256i (&rows)[2]) {
    for (int i = 0; i < 2; ++i) {
      const Partial* q = p + 4 * i;
      rows[i] = pair_up<8>(pair_up<4>(q[0].v, q[1].v), pair_up<4>(q[2].v, q[3].v));
    }
  }
  static void whole(const Partial (&p)[8], I32 (&out)[1]) {
    __m256i rows[2];
    sum_halves(p, rows);
    out[0].v = _mm256_add_epi32(_mm256_permute2x128_si256(rows[0], rows[1], 0x20),
                                _mm256_permute2x128_si256(rows[0], rows[1], 0x31));
  }
  static void halves(const Partial (&p)[8], I32 (&out)[2]) {
    __m256i rows[2];
    sum_halves(p, rows);
    out[0].v = _mm256_permute2x128_si256(rows[0], rows[1], 0x20);
    out[1].v = _mm256_permute2x128_si256(rows[0], rows[1], 0x31);
  }
  // A vector holds rows r and r + 4, so that sums need not cross its halves.
  template <class W>
  static void nibbles(const std::uint8_t* p, std::int64_t stride, Bytes32 x, __m256i (&rows)[2]) {
    const __m256i x_low = _mm256_permute2x128_si256(x.v, x.v, 0x00);
    const __m256i x_high = _mm256_permute2x128_si256(x.v, x.v, 0x11);
    __m256i sums[4];   // of 8 products
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const Bytes32 two = load_halves(p + r * stride, p + (r + 4) * stride);
      const __m256i codes[2] = {W::decode(two.bits(0, 0x0f)).v, W::decode(two.bits(-4, 0x0f)).v};
      sums[r] = Product::template fours<2>(codes, [&](int i) { return i == 0 ? x_low : x_high; });
    }
    rows[0] = pair_up<8>(sums[0], sums[1]);
    rows[1] = pair_up<8>(sums[2], sums[3]);
  }
  template <class W>
  static void nibbles(const std::uint8_t* p, std::int64_t stride, Bytes32 x, I32 (&out)[1]) {
    __m256i rows[2];
    nibbles<W>(p, stride, x, rows);
    out[0].v = pair_up<16>(rows[0], rows[1]);
  }
  template <class W>
  static void nibbles(const std::uint8_t* p, std::int64_t stride, Bytes32 x, I32 (&out)[2]) {
    __m256i rows[2];
    nibbles<W>(p, stride, x, rows);
    const __m256 a = _mm256_castsi256_ps(rows[0]), b = _mm256_castsi256_ps(rows[1]);
    out[0].v = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
    out[1].v = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
  }
};

// Codes of a panel are signed bytes, which unsigned activations x + 128 multiply straight from memory; what the
// 128 adds is known beforehand. With the sides the other way round every code would need a register, and the
// shift of the codes a correction for each token.
template <class Product, int kParts>
struct PanelBlock {
  alignas(32) std::uint8_t codes[256];
  __m256i surplus[kParts];   // to be added: -128 times the sum of the codes, lane r of row r

  __m256i group(int g) const { return _mm256_load_si256(reinterpret_cast<const __m256i*>(codes) + g); }
  void finish() {
    constexpr int kPart = 8 / kParts;
    __m256i* v = reinterpret_cast<__m256i*>(codes);
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) {
      __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int g = i * kPart; g < (i + 1) * kPart; ++g) {
        const __m256i code = _mm256_sub_epi8(_mm256_load_si256(v + g), _mm256_set1_epi8(Product::kZero));
        _mm256_store_si256(v + g, code);
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(_mm256_set1_epi8(1), code));
      }
      surplus[i] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(-128));
    }
  }
};

template <int kParts>
struct PanelBlock<struct Signed, kParts> {   // products of two whole bytes leave no room for the 128
  alignas(32) std::uint8_t codes[256];

  void finish() {}
};

struct PanelToken {
  const std::int8_t* q;
  const std::uint8_t* raised;
};

// Of whole bytes, whose products leave no room for the 128: the codes stay in registers while the tokens pass.
template <class Product, int kParts>
  requires std::same_as<Product, struct Signed>
FT_INLINE void panel_dot(const PanelBlock<Product, kParts>* const (&blocks)[1], const PanelToken& x, I32 (&out)[1][kParts]) {
  constexpr int kPart = 8 / kParts;
  __m256i codes[8];
  for (int g = 0; g < 8; ++g) codes[g] = _mm256_load_si256(reinterpret_cast<const __m256i*>(blocks[0]->codes) + g);
#pragma GCC unroll 2
  for (int i = 0; i < kParts; ++i) {
    const std::int8_t* from = x.q + i * kPart * 4;
    out[0][i].v = Product::template fours<kPart>(codes + i * kPart, [&](int g) { return broadcast_4(from + 4 * g); });
  }
}

// What a multiplication of unsigned by signed bytes gets for a product of a code and an activation.
template <int kMaxCode, int kZeroCode>
struct UnsignedCodes {
  static constexpr int kMax = kMaxCode, kZero = kZeroCode, kPanelGroups = 2;
  static __m256i codes(__m256i w) { return w; }
  static __m256i activations(__m256i, __m256i x) { return x; }
};

struct SignedCodes {   // the sign of the code moves to the activation: |w| * (x * sign w)
  static constexpr int kMax = 128, kZero = 0, kPanelGroups = 1;
  static __m256i codes(__m256i w) { return _mm256_abs_epi8(w); }
  static __m256i activations(__m256i w, __m256i x) { return _mm256_sign_epi8(x, w); }
};

}  // namespace ft::FT_ISA_NAMESPACE
