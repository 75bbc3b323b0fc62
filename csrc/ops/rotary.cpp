#include "ops/elementwise_parallel.h"
#include "ops/kernel_set.h"
#include "ops/ops.h"

namespace ft {
namespace {

// Pairs are (i, i + half).
void rotate_halves(float* x, const float* cos, const float* sin, std::int64_t half) {
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

// Pairs are (2i, 2i + 1).
void rotate_neighbours(float* x, const float* cos, const float* sin, std::int64_t half) {
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

}  // namespace

// Memory-bound and small beside the projections: plain loops, the same for every instruction set.
void rotary(ThreadPool& pool, const KernelSet&, const RotaryArgs& args) {
  const auto rotate = args.interleaved ? rotate_neighbours : rotate_halves;
  const std::int64_t half = args.rotary_dims / 2;
  const std::int64_t operations = 3 * args.rotary_dims * (args.q_heads + args.kv_heads);
  parallel_for(pool, args.tokens, operations, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const float *cos = args.cos + t * half, *sin = args.sin + t * half;
      for (std::int64_t h = 0; h < args.q_heads; ++h) {
        rotate(args.q + (t * args.q_heads + h) * args.head_dim, cos, sin, half);
      }
      for (std::int64_t h = 0; h < args.kv_heads; ++h) {
        rotate(args.k + (t * args.kv_heads + h) * args.head_dim, cos, sin, half);
      }
    }
  });
}

}  // namespace ft
