#include "core/cpu_features.h"

namespace ft {

bool host_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

std::vector<std::string> host_isas() {
  std::vector<std::string> isas{"scalar"};
#if defined(FT_HAVE_AVX2)
  if (host_has_avx2()) isas.push_back("avx2");
#endif
  return isas;
}

}  // namespace ft
