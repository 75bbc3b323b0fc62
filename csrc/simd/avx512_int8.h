// AVX-512 (F, BW, DQ, VL) without dot products of bytes: the primitives of AVX2, in vectors of 256 bits, for
// which the compiler then has 32 registers, masks and operations of three inputs.
#pragma once

#include "simd/avx2_int8.h"
