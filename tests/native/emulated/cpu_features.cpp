// In place of csrc/core/cpu_features.cpp: with emulated intrinsics a host with AVX2 runs every instruction
// set.
#include "core/cpu_features.h"

namespace ft {

std::vector<std::string> host_isas() { return {"scalar", "avx2", "avx512", "avx_vnni", "avx512_vnni"}; }

}  // namespace ft
