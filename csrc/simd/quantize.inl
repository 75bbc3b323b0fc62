// Activations to int8. Included once, by the translation unit that builds an instruction set's KernelSet.

namespace ft::FT_ISA_NAMESPACE {
namespace {

// One row of cols numbers (a multiple of 32): per block d = max|x| / 127, q = round(x / d) to nearest
// even in [-127, 127], two sums of 16 q. A block with a NaN or an infinity gets d = NaN, so that
// every product with it is NaN; one whose d underflows to zero gets zeros.
void quantize_row(const float* x, std::int64_t cols, std::int8_t* q, float* d, std::int32_t* sum) {
  constexpr int kVectors = 32 / F32::kWidth;
  for (std::int64_t b = 0; b < cols / 32; ++b, x += 32, q += 32, sum += 2) {
    F32 v[kVectors];
    F32 largest = F32::zero();
    F32 poison = F32::zero();   // 0 * x: NaN if x is not finite
    for (int i = 0; i < kVectors; ++i) {
      v[i] = F32::load(x + i * F32::kWidth);
      largest = max(largest, abs(v[i]));
      poison = poison + v[i] * F32::zero();
    }
    d[b] = hmax(largest) / 127.0f + hsum(poison);
    sum[0] = sum[1] = 0;
    if (!(d[b] > 0.0f)) {
      for (int i = 0; i < 32; ++i) q[i] = 0;
      continue;
    }
    float rounded[32];
    const F32 scale = F32::broadcast(d[b]);
    const F32 limit = F32::broadcast(127.0f);
    for (int i = 0; i < kVectors; ++i) {
      max(min(round(v[i] / scale), limit), F32::zero() - limit).store(rounded + i * F32::kWidth);
    }
    for (int i = 0; i < 32; ++i) {
      const std::int32_t value = static_cast<std::int32_t>(rounded[i]);
      q[i] = static_cast<std::int8_t>(value);
      sum[i / 16] += value;
    }
  }
}

}  // namespace
}  // namespace ft::FT_ISA_NAMESPACE
