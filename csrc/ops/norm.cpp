#include "ops/elementwise_parallel.h"
#include "ops/kernel_set.h"
#include "ops/ops.h"

namespace ft {

void rms_norm(ThreadPool& pool, const KernelSet& kernels, const float* x, const float* weight, float eps,
              float* y, std::int64_t rows, std::int64_t n) {
  parallel_for(pool, rows, 2 * n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      kernels.rms_norm_row(x + row * n, weight, eps, y + row * n, n);
    }
  });
}

void add_rms_norm(ThreadPool& pool, const KernelSet& kernels, const float* x, float* residual,
                  const float* weight, float eps, float* y, std::int64_t rows, std::int64_t n) {
  parallel_for(pool, rows, 3 * n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      kernels.add(x + row * n, residual + row * n, n);
      kernels.rms_norm_row(residual + row * n, weight, eps, y + row * n, n);
    }
  });
}

}  // namespace ft
