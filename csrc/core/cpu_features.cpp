#include "core/cpu_features.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ft {
namespace {

#if defined(__x86_64__)

struct CpuId {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  CpuId(unsigned leaf, unsigned subleaf) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

// The operating system must save the registers too: __builtin_cpu_supports sees to that. It does not know
// every name with every compiler, hence CpuId. Not every build asks for all of them.
[[maybe_unused]] bool has_avx2() {
  constexpr unsigned kF16c = 1u << 29;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (CpuId(1, 0).ecx & kF16c) != 0;
}

[[maybe_unused]] bool has_avx_vnni() {
  constexpr unsigned kAvxVnni = 1u << 4;
  return has_avx2() && (CpuId(7, 1).eax & kAvxVnni) != 0;
}

[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

[[maybe_unused]] bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

#elif defined(__aarch64__)

[[maybe_unused]] bool has_neon_dot_products() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

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
#if defined(FT_HAVE_NEON)
  if (has_neon_dot_products()) isas.push_back("neon");
#endif
  return isas;
}

}  // namespace ft
