// The CPU operators. Pointers are to contiguous row-major arrays; shapes in comments use the
// letters of docs/architecture.md. Every operator treats each token alone: its result does not
// depend, not by a bit, on the other tokens of the batch or on the number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/pool.h"
#include "formats/format.h"
#include "ops/activation.h"

namespace ft {

struct KernelSet;   // the kernels of one instruction set (ops/kernel_set.h)

struct ExpertPart {   // one tensor of every expert; see PackedMatrix for the strides
  Format format;
  std::int64_t rows, cols;
  std::vector<std::uint64_t> codes, scales;   // addresses, [E]
  std::int64_t code_row_stride, code_block_stride, scale_row_stride, scale_block_stride;
  // Addresses of each expert's float32 factor, [E], or empty: 1. Read when an expert is computed: a slot's
  // factor changes with the expert that is fetched into it. No alignment is asked of them.
  std::vector<std::uint64_t> factors = {};
  std::vector<std::uint64_t> biases = {};   // addresses of each expert's float32 [rows], [E]; empty: none

  PackedMatrix matrix(std::size_t expert) const;   // all but its factor
};

inline PackedMatrix ExpertPart::matrix(std::size_t expert) const {
  return {
      .format = format,
      .rows = rows,
      .cols = cols,
      .codes = reinterpret_cast<const std::uint8_t*>(codes[expert]),
      .scales = reinterpret_cast<const std::uint8_t*>(scales[expert]),
      .code_row_stride = code_row_stride,
      .code_block_stride = code_block_stride,
      .scale_row_stride = scale_row_stride,
      .scale_block_stride = scale_block_stride,
  };
}

struct ExpertBank {
  ExpertPart gate, up, down;   // [I, H], [I, H], [H, I]
  GatedActivation activation;
};

struct LinearPart {   // y[T, N] = x[T, H] w[N, H]^T (+ bias[N], or null)
  const PackedMatrix* w;
  const float* bias;
  float* y;
};
// All parts with the same x[T, H], as one piece of work.
void linear(ThreadPool&, const KernelSet&, std::span<const LinearPart> parts, const float* x, std::int64_t tokens);
// y[T, H] = rows ids[T] of w, dequantised
void embed(ThreadPool&, const KernelSet&, const PackedMatrix& w, const std::int64_t* ids, float* y,
           std::int64_t tokens);

struct ExpertArgs {
  const ExpertBank* bank;
  const float* x;             // [T, H]
  const std::int32_t* ids;    // [T, K]; -1: skip
  const float* weights;       // [T, K]; 0: skip
  double* y;                  // [T, H], overwritten: sums of terms rounded to float32
  std::int64_t tokens, top_k;
  std::atomic<std::uint64_t>* progress = nullptr;   // moves at least once for each expert
};
// A Task for ThreadPool::run or ::submit. Everything that depends on the values of ids, weights and
// x is read when it runs; construction allocates nothing that grows with T more than once. `teams`: of the
// pool that will run it.
std::unique_ptr<Task> make_expert_task(const KernelSet&, const ExpertArgs&, std::span<const Team> teams);

// x[rows, n] -> y; see kernels/base.py for the meaning of each
void rms_norm(ThreadPool&, const KernelSet&, const float* x, const float* weight, float eps, float* y,
              std::int64_t rows, std::int64_t n);
void add_rms_norm(ThreadPool&, const KernelSet&, const float* x, float* residual, const float* weight,
                  float eps, float* y, std::int64_t rows, std::int64_t n);
void gated_activation(ThreadPool&, const KernelSet&, const GatedActivation&, const float* gate, const float* up,
                      float* y, std::int64_t n);

struct RotaryArgs {
  float *q, *k;   // [T, Hq, D], [T, Hk, D], rotated in place
  const float *cos, *sin;   // [T, R/2]
  std::int64_t tokens, q_heads, kv_heads, head_dim, rotary_dims;
  bool interleaved;
};
void rotary(ThreadPool&, const KernelSet&, const RotaryArgs&);

void write_kv(const float* k, const float* v, float* k_cache, float* v_cache, const std::int64_t* slots,
              std::int64_t tokens, std::int64_t row_elements);

struct AttentionArgs {
  const float* q;                    // [T, Hq, D]
  const float *k_cache, *v_cache;    // [pages, page_tokens, Hk, D]
  const std::int32_t* block_table;   // [S, P]
  const std::int32_t *sequence, *positions;   // [T]; sequence -1: a padded row, output zero
  float* out;                        // [T, Hq, D]
  std::int64_t tokens, q_heads, kv_heads, head_dim, page_tokens, max_pages;
  float scale;
  std::int64_t window;   // 0: none
  const float* sinks = nullptr;   // [Hq]: a logit of each head that takes its share and gives nothing
};
void paged_attention(ThreadPool&, const KernelSet&, const AttentionArgs&);

void route_topk(const float* logits, std::int64_t tokens, std::int64_t experts, std::int64_t top_k,
                bool renormalize, float* weights, std::int32_t* ids);

}  // namespace ft
