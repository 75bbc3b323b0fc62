// AVX2 with AVX-VNNI, the dot products of bytes that processors without AVX-512 have.
#pragma once

#include <immintrin.h>

namespace ft::FT_ISA_NAMESPACE {

inline __m256i dpbusd(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }

}  // namespace ft::FT_ISA_NAMESPACE

#include "simd/vnni_int8.h"
