// The table of kernels of one instruction set. Chosen once, at start.
#pragma once

#include <cstdint>

#include "formats/format.h"

namespace ft {

// Activations of T tokens, prepared once and read by every weight row. int8: blocks of 32 with
// x ~ q * d; `sum` is d times the sum of the block's q (what formats with a minimum need).
struct Activations {
  std::int64_t tokens, cols;
  const float* f32;          // [T, cols]
  const std::int8_t* q;      // [T, cols] or null
  const float* d;            // [T, cols/32] or null
  const float* sum;          // [T, cols/32] or null
};

struct FormatKernels {
  bool int8_activations;
  // y[(t - t0) * y_stride + (r - r0)] = w[r] . x[t] for rows [r0, r1), tokens [t0, t1). The order
  // of additions of one (r, t) depends on cols alone.
  void (*dot)(const PackedMatrix& w, std::int64_t r0, std::int64_t r1, const Activations& x, std::int64_t t0,
              std::int64_t t1, float* y, std::int64_t y_stride);
  void (*dequantize_row)(const PackedMatrix& w, std::int64_t row, float* y);
};

struct KernelSet {
  const char* isa;   // "scalar", "avx2"
  FormatKernels formats[kFormatCount];
  // One token's cols (multiple of 32) to int8 blocks: d = max|x| / 127, q = round(x / d).
  void (*quantize_row)(const float* x, std::int64_t cols, std::int8_t* q, float* d, float* sum);
  void (*silu_mul)(const float* gate, const float* up, float* y, std::int64_t n);
  void (*rms_norm_row)(const float* x, const float* weight, float eps, float* y, std::int64_t n);
  void (*add)(const float* x, float* y, std::int64_t n);   // y += x
  void (*axpy)(float a, const float* x, float* y, std::int64_t n);   // y += a * x
  float (*dot_f32)(const float* a, const float* b, std::int64_t n);
  float (*exp_sum)(float* x, float max, std::int64_t n);   // x = exp(x - max), returns the sum
};

const KernelSet& scalar_kernels();
const KernelSet& avx2_kernels();   // only on hosts that have AVX2, FMA and F16C
// The best set for this host, or the one named. Throws std::invalid_argument naming what the host has.
const KernelSet& select_kernels(const char* isa_or_null);

}  // namespace ft
