// What this processor can run.
#pragma once

#include <string>
#include <vector>

namespace ft {

// AVX2, FMA and F16C, and an operating system that saves their registers.
bool host_has_avx2();

// The instruction sets that this build has kernels for and that this host can run, best last.
std::vector<std::string> host_isas();

}  // namespace ft
