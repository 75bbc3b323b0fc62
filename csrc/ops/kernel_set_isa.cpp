// Compiled once per instruction set (-DFT_ISA=...): the kernels of all formats and the vector kernels,
// as one table.
#include "formats/bf16.h"
#include "formats/ds_fp4.h"
#include "formats/exact_dot.h"
#include "formats/f16.h"
#include "formats/f32.h"
#include "formats/fp8_128.h"
#include "formats/mxfp4.h"
#include "formats/nvfp4.h"
#include "formats/q4_0.h"
#include "formats/q4_1.h"
#include "formats/q4_k.h"
#include "formats/q5_k.h"
#include "formats/q6_k.h"
#include "formats/q8_0.h"
#include "ops/kernel_set.h"
#include "simd/quantize.inl"
#include "simd/simd.h"
#include "simd/vector_kernels.inl"

namespace ft {
namespace FT_ISA_NAMESPACE {
namespace {

void prepare_int8(const float* x, std::int64_t cols, const ActivationRow& out) {
  quantize_row(x, cols, out.q, out.d, out.sum);
}

template <class W>
constexpr FormatKernels quantized(Precision precision) {
  if (precision == Precision::Exact) return exact_kernels<W>();
  FormatKernels kernels = quantized_kernels<W>();
  kernels.activation_block = 32;
  kernels.prepare = prepare_int8;
  return kernels;
}

template <class Wide, class W>
constexpr FormatKernels quantized_wide(Precision precision) {
  FormatKernels kernels = quantized<W>(precision);
  if (precision == Precision::Int8) kernels.dot = quantized_dot_wide<Wide, W>;
  return kernels;
}

void prepare_fp8(const float* x, std::int64_t cols, const ActivationRow& out) { round_fp8(x, cols, out.f32); }

void prepare_fp8_int8(const float* x, std::int64_t cols, const ActivationRow& out) {
  constexpr std::int64_t kBlock = DS_FP4::kRoundedColumns;
  float rounded[kBlock];
  for (std::int64_t c = 0; c < cols; c += kBlock) {
    const std::int64_t n = cols - c < kBlock ? cols - c : kBlock;
    round_fp8(x + c, n, rounded);
    quantize_row(rounded, n, out.q + c, out.d + c / 32, out.sum + c / 16);
  }
}

constexpr FormatKernels ds_fp4(Precision precision) {
  FormatKernels kernels = quantized_wide<DS_FP4_Wide, DS_FP4>(precision);
  kernels.activation_block = DS_FP4::kRoundedColumns;
  kernels.prepare = precision == Precision::Exact ? prepare_fp8 : prepare_fp8_int8;
  return kernels;
}

constexpr KernelSet make_kernels(Precision precision) {
  KernelSet set = {
      .isa = FT_QUOTE(FT_ISA),
      .precision = precision,
      .formats = {},
      .gated = {silu_mul, gelu_mul, gelu_tanh_mul, clamped_swiglu, relu_squared_mul},   // as the enum
      .rms_norm_row = rms_norm_row,
      .add = add,
      .add_scaled = add_scaled,
      .exp_sum = exp_sum,
      .max_f32 = max_f32,
      .attention_scores = attention_scores,
      .attention_values = attention_values,
  };
  const auto format = [&set](Format f) -> FormatKernels& { return set.formats[static_cast<int>(f)]; };
  format(Format::F32) = float_kernels<F32Weights>();
  format(Format::F16) = float_kernels<F16Weights>();
  format(Format::BF16) = float_kernels<BF16Weights>();
  format(Format::Q8_0) = quantized<Q8_0>(precision);
  format(Format::Q4_0) = quantized<Q4_0>(precision);
  format(Format::Q4_1) = quantized<Q4_1>(precision);
  format(Format::Q4_K) = quantized<Q4_K>(precision);
  format(Format::Q5_K) = quantized<Q5_K>(precision);
  format(Format::Q6_K) = quantized<Q6_K>(precision);
  format(Format::MXFP4) = quantized<MXFP4>(precision);
  format(Format::MXFP4_PAIRS) = quantized_wide<MXFP4_PAIRS_Wide, MXFP4_PAIRS>(precision);
  format(Format::NVFP4) = quantized<NVFP4>(precision);
  format(Format::NVFP4_PAIRS) = quantized_wide<NVFP4_PAIRS_Wide, NVFP4_PAIRS>(precision);
  format(Format::DS_FP4) = ds_fp4(precision);
  format(Format::FP8_128) = fp8_kernels();
  return set;
}

constexpr KernelSet kInt8 = make_kernels(Precision::Int8);
constexpr KernelSet kExact = make_kernels(Precision::Exact);

}  // namespace
}  // namespace FT_ISA_NAMESPACE

const KernelSet& FT_JOIN(FT_ISA, _kernels)(Precision precision) {
  return precision == Precision::Exact ? FT_ISA_NAMESPACE::kExact : FT_ISA_NAMESPACE::kInt8;
}

}  // namespace ft
