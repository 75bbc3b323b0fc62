#include "core/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ft {
namespace {

// Each of these includes that the operating system saves the registers.
#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx_vnni() {   // GCC 10 and some Clangs have no name for it
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAvxVnni = 1u << 4;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kAvxVnni) != 0;
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

}  // namespace

std::vector<std::string> host_isas() {
  std::vector<std::string> isas{"scalar"};
#if defined(FT_HAVE_AVX2)
  if (has_avx2()) isas.push_back("avx2");
#endif
#if defined(FT_HAVE_AVX512)
  if (has_avx512()) isas.push_back("avx512");
#endif
#if defined(FT_HAVE_AVX_VNNI)
  if (has_avx_vnni()) isas.push_back("avx_vnni");
#endif
#if defined(FT_HAVE_AVX512_VNNI)
  if (has_avx512_vnni()) isas.push_back("avx512_vnni");
#endif
  return isas;
}

}  // namespace ft
