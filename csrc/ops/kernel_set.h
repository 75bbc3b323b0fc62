// The table of kernels of one instruction set. Chosen once, at start.
#pragma once

#include <cstdint>

#include "formats/format.h"
#include "ops/activation.h"

namespace ft {

// Activations of T tokens, prepared once and read by every weight row. int8: blocks of 32 with
// x ~ q * d; `sum` are sums of 16 q (what formats with an offset or a minimum need); `raised` are q + 128.
struct Activations {
  std::int64_t cols;
  const float* f32;          // [T, cols], or null if only int8 is read
  const std::int8_t* q;      // [T, cols] or null
  const float* d;            // [T, cols/32] or null
  const std::int32_t* sum;   // [T, cols/16] or null
  const std::uint8_t* raised = nullptr;   // [T, cols] or null

  const float* f32_row(std::int64_t token) const { return f32 + token * cols; }
};

// Some of those tokens: `list` names them; without a list they are `first`, `first + 1`, ...
struct TokenRange {
  const std::int32_t* list;
  std::int64_t first, count;

  std::int64_t row(std::int64_t j) const { return list != nullptr ? list[j] : first + j; }
};

// How quantised weights read activations: as int8 blocks, or as float32 that meet dequantised weights.
enum class Precision : std::uint8_t { Int8, Exact };

// Where the prepared form of a row of activations is written: f32, or the other three.
struct ActivationRow {
  float* f32;
  std::int8_t* q;
  float* d;
  std::int32_t* sum;
};

struct FormatKernels {
  bool int8_activations = false;
  // Columns of x that are prepared together; every piece that is prepared is whole blocks of them.
  int activation_block = 1;
  // x to what `dot` reads: q, d and sum if int8_activations (blocks of 32, d = max|x| / 127, q = round(x / d)),
  // else f32. Null: float32 as they are.
  void (*prepare)(const float* x, std::int64_t cols, const ActivationRow& out) = nullptr;
  // y[j * y_stride + (r - r0)] = w[r] . x[tokens.row(j)] for rows [r0, r1), j < tokens.count. The
  // order of additions of one (row, token) depends on cols alone.
  void (*dot)(const PackedMatrix& w, std::int64_t r0, std::int64_t r1, const Activations& x,
              const TokenRange& tokens, float* y, std::int64_t y_stride) = nullptr;
  void (*dequantize_row)(const PackedMatrix& w, std::int64_t row, float* y) = nullptr;
};

// Consecutive rows of one kv head inside a page of the cache: row p begins at first + p * stride.
struct CachedRows {
  const float* first;
  std::int64_t stride, count, dim;
};

struct KernelSet {
  const char* isa;   // as host_isas names it
  Precision precision;
  FormatKernels formats[kFormatCount];
  // y = act(gate) * up; y may be gate or up. What is not finite in either is not finite in y.
  void (*gated[kActivationCount])(const float* gate, const float* up, float* y, std::int64_t n,
                                  const GatedActivation& parameters);
  void (*rms_norm_row)(const float* x, const float* weight, float eps, float* y, std::int64_t n);
  void (*add)(const float* x, float* y, std::int64_t n);   // y += x
  // y += a * x, the product rounded to float32 and added in float64: sums of a few such terms are
  // exact unless the terms lie more than 2^25 apart, so neither order nor grouping shows in them
  void (*add_scaled)(float a, const float* x, double* y, std::int64_t n);
  float (*exp_sum)(float* x, float max, std::int64_t n);   // x = exp(x - max), returns the sum
  float (*max_f32)(const float* x, std::int64_t n);   // -inf for n = 0; NaN entries are passed over
  // scores[g * score_stride + p] = scale * q[g] . keys[p], q [group, dim]
  void (*attention_scores)(const float* q, std::int64_t group, const CachedRows& keys, float scale,
                           float* scores, std::int64_t score_stride);
  // out[g] += sum over p of weights[g * weight_stride + p] * values[p], out [group, dim]
  void (*attention_values)(const float* weights, std::int64_t weight_stride, std::int64_t group,
                           const CachedRows& values, float* out);

  // Throws std::invalid_argument for a format without kernels.
  const FormatKernels& format(Format f) const;
  void activate(const GatedActivation& a, const float* gate, const float* up, float* y, std::int64_t n) const {
    gated[static_cast<int>(a.kind)](gate, up, y, n, a);
  }
};

const KernelSet& scalar_kernels(Precision precision);
// Only in builds and on hosts that host_isas names them for.
const KernelSet& avx2_kernels(Precision precision);
const KernelSet& avx512_kernels(Precision precision);
const KernelSet& avx_vnni_kernels(Precision precision);
const KernelSet& avx512_vnni_kernels(Precision precision);
const KernelSet& neon_kernels(Precision precision);
// The best set for this host, or the one named. Throws std::invalid_argument naming what the host has.
const KernelSet& select_kernels(const char* isa_or_null, Precision precision = Precision::Int8);

}  // namespace ft
