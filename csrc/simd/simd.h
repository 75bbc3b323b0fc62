// Picks the primitives of the instruction set that this translation unit is compiled for, given as
// -DFT_ISA=<name>. Everything built on them lives in ft::isa_<name>, so that two instruction sets
// never share a symbol.
#pragma once

#ifndef FT_ISA
#error "compile with -DFT_ISA=<instruction set>, e.g. scalar, avx2 or neon"
#endif

#define FT_JOIN_(a, b) a##b
#define FT_JOIN(a, b) FT_JOIN_(a, b)
#define FT_QUOTE_(a) #a
#define FT_QUOTE(a) FT_QUOTE_(a)
#define FT_ISA_NAMESPACE FT_JOIN(isa_, FT_ISA)
#define FT_INLINE inline __attribute__((always_inline))   // where a call costs more than the work

#include FT_QUOTE(simd/FT_JOIN(FT_ISA, _int8).h)   // and with it the other primitives
