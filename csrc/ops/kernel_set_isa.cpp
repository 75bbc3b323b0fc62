// Compiled once per instruction set (-DFT_ISA=...): the kernels of all formats and the vector kernels,
// as one table.
#include "formats/bf16.h"
#include "formats/f16.h"
#include "formats/f32.h"
#include "formats/q4_0.h"
#include "formats/q4_1.h"
#include "formats/q8_0.h"
#include "ops/kernel_set.h"
#include "simd/quantize.inl"
#include "simd/simd.h"
#include "simd/vector_kernels.inl"

namespace ft {
namespace FT_ISA_NAMESPACE {
namespace {

constexpr KernelSet kKernels = {
    .isa = FT_QUOTE(FT_ISA),
    .formats =   // in the order of the enum
    {
        float_kernels<F32Weights>(),
        float_kernels<F16Weights>(),
        float_kernels<BF16Weights>(),
        quantized_kernels<Q8_0>(),
        quantized_kernels<Q4_0>(),
        quantized_kernels<Q4_1>(),
    },
    .quantize_row = quantize_row,
    .silu_mul = silu_mul,
    .rms_norm_row = rms_norm_row,
    .add = add,
    .axpy = axpy,
    .dot_f32 = dot_f32,
    .exp_sum = exp_sum,
    .max_f32 = max_f32,
    .attention_scores = attention_scores,
    .attention_values = attention_values,
};

}  // namespace
}  // namespace FT_ISA_NAMESPACE

const KernelSet& FT_JOIN(FT_ISA, _kernels)() { return FT_ISA_NAMESPACE::kKernels; }

}  // namespace ft
