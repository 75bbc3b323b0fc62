#include <algorithm>
#include <cstring>

#include "ops/elementwise_parallel.h"
#include "ops/kernel_set.h"
#include "ops/ops.h"

namespace ft {

void gated_activation(ThreadPool& pool, const KernelSet& kernels, const GatedActivation& activation,
                      const float* gate, const float* up, float* y, std::int64_t n) {
  constexpr std::int64_t kBlock = 1024;
  constexpr std::int64_t kOperations = 20;   // an exponential, a division, two products
  const std::int64_t blocks = (n + kBlock - 1) / kBlock;
  parallel_for(pool, blocks, kBlock * kOperations, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * kBlock;
    kernels.activate(activation, gate + first, up + first, y + first, std::min(end * kBlock, n) - first);
  });
}

void write_kv(const float* k, const float* v, float* k_cache, float* v_cache, const std::int64_t* slots,
              std::int64_t tokens, std::int64_t row_elements) {
  const std::size_t row_bytes = static_cast<std::size_t>(row_elements) * sizeof(float);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::memcpy(k_cache + slots[t] * row_elements, k + t * row_elements, row_bytes);
    std::memcpy(v_cache + slots[t] * row_elements, v + t * row_elements, row_bytes);
  }
}

}  // namespace ft
