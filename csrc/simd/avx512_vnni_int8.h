// As simd/avx512_int8.h, with the dot products of bytes of AVX512_VNNI.
#pragma once

#include <immintrin.h>

namespace ft::FT_ISA_NAMESPACE {

inline __m256i dpbusd(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_epi32(sum, w, x); }

}  // namespace ft::FT_ISA_NAMESPACE

#include "simd/vnni_int8.h"
