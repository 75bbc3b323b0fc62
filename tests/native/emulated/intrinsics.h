// Included before everything else where an instruction set beyond AVX2 is compiled for a host that has AVX2:
// SIMDe's functions in place of the intrinsics.
#pragma once

#include <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

// AVX-VNNI does what AVX512_VNNI does, in another encoding.
#define _mm256_dpbusd_avx_epi32(sum, a, b) simde_mm256_dpbusd_epi32(sum, a, b)
