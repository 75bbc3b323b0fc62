// What this processor can run.
#pragma once

#include <string>
#include <vector>

namespace ft {

// AVX2, FMA and F16C, and an operating system that saves their registers.
bool host_has_avx2();

// NEON with its dot products of int8 (in every processor since ARMv8.4, in many since 8.2).
bool host_has_neon();

// The instruction sets that this build has kernels for and that this host can run, best last.
std::vector<std::string> host_isas();

}  // namespace ft
