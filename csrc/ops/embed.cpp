#include <stdexcept>
#include <string>

#include "ops/elementwise_parallel.h"
#include "ops/kernel_set.h"
#include "ops/ops.h"

namespace ft {

void embed(ThreadPool& pool, const KernelSet& kernels, const PackedMatrix& w, const std::int64_t* ids,
           float* y, std::int64_t tokens) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (ids[t] >= 0 && ids[t] < w.rows) continue;
    throw std::invalid_argument("token " + std::to_string(t) + " has id " + std::to_string(ids[t]) +
                                ", but the embedding has rows 0 to " + std::to_string(w.rows - 1) +
                                "; was the text encoded with another model's tokenizer?");
  }
  const FormatKernels& format = kernels.format(w.format);
  parallel_for(pool, tokens, w.cols, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) format.dequantize_row(w, ids[t], y + t * w.cols);
  });
}

}  // namespace ft
