#include "ops/kernel_set.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "core/cpu_features.h"

namespace ft {

namespace {

struct NamedKernels {
  const char* isa;
  const KernelSet& (*kernels)(Precision);
};

// As host_isas names them.
constexpr NamedKernels kSets[] = {
    {"scalar", scalar_kernels},
#if defined(FT_HAVE_AVX2)
    {"avx2", avx2_kernels},
#endif
#if defined(FT_HAVE_AVX512)
    {"avx512", avx512_kernels},
#endif
#if defined(FT_HAVE_AVX_VNNI)
    {"avx_vnni", avx_vnni_kernels},
#endif
#if defined(FT_HAVE_AVX512_VNNI)
    {"avx512_vnni", avx512_vnni_kernels},
#endif
#if defined(FT_HAVE_NEON)
    {"neon", neon_kernels},
#endif
};

}  // namespace

const FormatKernels& KernelSet::format(Format f) const {
  const FormatKernels& kernels = formats[static_cast<int>(f)];
  if (kernels.dot != nullptr) return kernels;
  throw std::invalid_argument(std::string("no kernels for the weight format ") + format_info(f).name +
                              " on the instruction set " + isa + "; use another format or another isa");
}

const KernelSet& select_kernels(const char* isa_or_null, Precision precision) {
  const std::vector<std::string> available = host_isas();
  const std::string wanted = isa_or_null != nullptr ? isa_or_null : available.back();
  std::string names;
  for (const std::string& isa : available) {
    names += (names.empty() ? "" : ", ") + isa;
    if (isa != wanted) continue;
    for (const NamedKernels& set : kSets) {
      if (isa == set.isa) return set.kernels(precision);
    }
  }
  throw std::invalid_argument("no kernels for the instruction set '" + wanted + "' on this host; it has: " +
                              names + ". Name one of these, or none to take the best.");
}

}  // namespace ft
