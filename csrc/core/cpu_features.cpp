#include "core/cpu_features.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace ft {

bool host_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool host_has_neon() {
#if defined(__aarch64__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}

std::vector<std::string> host_isas() {
  std::vector<std::string> isas{"scalar"};
#if defined(FT_HAVE_AVX2)
  if (host_has_avx2()) isas.push_back("avx2");
#endif
#if defined(FT_HAVE_NEON)
  if (host_has_neon()) isas.push_back("neon");
#endif
  return isas;
}

}  // namespace ft
