// Kernels on float32 vectors, over the primitives of simd/simd.h. Included once, at file scope, by the
// translation unit that builds an instruction set's KernelSet; what each one promises is said in
// ops/kernel_set.h. The order of additions depends on the length alone.

namespace ft::FT_ISA_NAMESPACE {
namespace {

constexpr std::int64_t kW = F32::kWidth;

// Loops over accumulators must be unrolled, or the accumulators live in memory: 2x on attention.
#define FT_UNROLL _Pragma("GCC unroll 8")

// e^x to 2e-7 relative, gradual underflow, infinity above 88.73, NaN for NaN. e^x = 2^n e^r with
// |r| <= ln(2) / 2; ln(2) in two parts, so that n times the first is exact without a fused product.
inline F32 exp(F32 x) {
  const F32 clamped = min(max(x, F32::broadcast(-104.0f)), F32::broadcast(89.0f));
  const F32 n = round(clamped * F32::broadcast(1.44269504f));
  const F32 r = fma(n, F32::broadcast(2.12194440e-4f), fma(n, F32::broadcast(-0.693359375f), clamped));
  F32 p = F32::broadcast(1.9875691500e-4f);
  p = fma(p, r, F32::broadcast(1.3981999507e-3f));
  p = fma(p, r, F32::broadcast(8.3334519073e-3f));
  p = fma(p, r, F32::broadcast(4.1665795894e-2f));
  p = fma(p, r, F32::broadcast(1.6666665459e-1f));
  p = fma(p, r, F32::broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + F32::broadcast(1.0f);
  const F32 half = round(n * F32::broadcast(0.5f));   // 2^n itself may lie outside of float32
  return keep_nan(p * pow2(half) * pow2(n - half), x);
}

float exp_sum(float* x, float max, std::int64_t n) {
  const F32 top = F32::broadcast(max);
  F32 sums = F32::zero();
  std::int64_t i = 0;
  for (; i + kW <= n; i += kW) {
    const F32 e = exp(F32::load(x + i) - top);
    e.store(x + i);
    sums = sums + e;
  }
  float sum = hsum(sums);
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    exp(F32::load_partial(x + i, rest) - top).store_partial(x + i, rest);
    for (; i < n; ++i) sum += x[i];
  }
  return sum;
}

float max_f32(const float* x, std::int64_t n) {
  F32 tops = F32::broadcast(-__builtin_inff());
  std::int64_t i = 0;
  for (; i + kW <= n; i += kW) tops = max(F32::load(x + i), tops);   // a NaN loses
  float top = hmax(tops);
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

float dot_f32(const float* a, const float* b, std::int64_t n) {
  F32 sums[4] = {F32::zero(), F32::zero(), F32::zero(), F32::zero()};
  std::int64_t i = 0;
  for (; i + 4 * kW <= n; i += 4 * kW) {
    FT_UNROLL
    for (int j = 0; j < 4; ++j) {
      sums[j] = fma(F32::load(a + i + j * kW), F32::load(b + i + j * kW), sums[j]);
    }
  }
  for (; i + kW <= n; i += kW) sums[0] = fma(F32::load(a + i), F32::load(b + i), sums[0]);
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    sums[1] = fma(F32::load_partial(a + i, rest), F32::load_partial(b + i, rest), sums[1]);
  }
  return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// y[i] = f(a[i], b[i]) over whole vectors and the remainder, with the same arithmetic in both. y may be
// a or b.
template <class F>
inline void map(const float* a, const float* b, float* y, std::int64_t n, F f) {
  std::int64_t i = 0;
  for (; i + kW <= n; i += kW) f(F32::load(a + i), F32::load(b + i)).store(y + i);
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    f(F32::load_partial(a + i, rest), F32::load_partial(b + i, rest)).store_partial(y + i, rest);
  }
}

void add(const float* x, float* y, std::int64_t n) {
  map(x, y, y, n, [](F32 a, F32 b) { return a + b; });
}

void add_scaled(float a, const float* x, double* y, std::int64_t n) {
  const F32 factor = F32::broadcast(a);
  std::int64_t i = 0;
  for (; i + kW <= n; i += kW) add_to_doubles(factor * F32::load(x + i), y + i);
  for (; i < n; ++i) {
    const float term = a * x[i];
    y[i] += static_cast<double>(term);
  }
}

// x * sigmoid(s * x)
inline F32 swish(F32 x, F32 scaled) { return x / (F32::broadcast(1.0f) + exp(F32::zero() - scaled)); }

// The chance that a normal variable exceeds a >= 0, erfc(a / sqrt(2)) / 2, to 1e-6 relative for a < 5:
// e^(-a^2 / 2) t P(t) with t = 1 / (1 + a / 4), P fitted so that its largest relative error, 3.4e-8, is
// the least that a polynomial of degree 9 allows.
inline F32 normal_tail(F32 a) {
  constexpr float kCoefficients[] = {-8.101087307e-2f, 9.584389991e-2f, -3.196491990e-2f,
                                     6.384512815e-2f,  5.892360092e-2f, 8.161367505e-2f,
                                     9.346519713e-2f,  9.973648855e-2f, 9.973556591e-2f};
  const F32 t = F32::broadcast(1.0f) / fma(a, F32::broadcast(0.25f), F32::broadcast(1.0f));
  F32 p = F32::broadcast(1.981222073e-2f);
  for (const float c : kCoefficients) p = fma(p, t, F32::broadcast(c));
  return p * t * exp(a * a * F32::broadcast(-0.5f));
}

// Not zero but NaN where a or b is not finite: for functions that would map an infinity to a number.
inline F32 poison(F32 a, F32 b) { return a * F32::zero() + b * F32::zero(); }

void silu_mul(const float* gate, const float* up, float* y, std::int64_t n, const GatedActivation&) {
  map(gate, up, y, n, [](F32 g, F32 u) { return swish(g, g) * u; });
}

void gelu_mul(const float* gate, const float* up, float* y, std::int64_t n, const GatedActivation&) {
  map(gate, up, y, n, [](F32 g, F32 u) {   // g Phi(g) without a difference of near numbers on either side
    const F32 size = abs(g);
    return (max(F32::zero(), g) - size * normal_tail(size)) * u;
  });
}

// (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (g + 0.044715 g^3)
void gelu_tanh_mul(const float* gate, const float* up, float* y, std::int64_t n, const GatedActivation&) {
  map(gate, up, y, n, [](F32 g, F32 u) {
    const F32 slope = fma(g * g, F32::broadcast(2.0f * 0.7978845608f * 0.044715f), F32::broadcast(2.0f * 0.7978845608f));
    return swish(g, g * slope) * u;
  });
}

void clamped_swiglu(const float* gate, const float* up, float* y, std::int64_t n, const GatedActivation& a) {
  const F32 limit = F32::broadcast(a.limit), alpha = F32::broadcast(a.alpha);
  map(gate, up, y, n, [limit, alpha](F32 g, F32 u) {
    const F32 c = min(limit, g);
    const F32 d = max(F32::zero() - limit, min(limit, u));
    return swish(c, alpha * c) * (d + F32::broadcast(1.0f)) + poison(g, u);
  });
}

void relu_squared_mul(const float* gate, const float* up, float* y, std::int64_t n, const GatedActivation&) {
  map(gate, up, y, n, [](F32 g, F32 u) {
    const F32 r = max(F32::zero(), g);
    return r * r * u + poison(g, u);
  });
}

void rms_norm_row(const float* x, const float* weight, float eps, float* y, std::int64_t n) {
  const float mean = dot_f32(x, x, n) / static_cast<float>(n);
  const F32 scale = F32::broadcast(1.0f / __builtin_sqrtf(mean + eps));
  map(x, weight, y, n, [scale](F32 v, F32 w) { return v * scale * w; });
}

// P cached rows against G queries; each row and each query is loaded once.
template <int P, int G>
inline void score_tile(const float* q, const float* k, const CachedRows& rows, float scale, float* scores,
                       std::int64_t score_stride) {
  F32 sums[P][G];
  FT_UNROLL
  for (int p = 0; p < P; ++p) {
    FT_UNROLL
    for (int g = 0; g < G; ++g) sums[p][g] = F32::zero();
  }
  const auto step = [&](auto load, std::int64_t d) {
    F32 query[G];
    FT_UNROLL
    for (int g = 0; g < G; ++g) query[g] = load(q + g * rows.dim + d);
    FT_UNROLL
    for (int p = 0; p < P; ++p) {
      const F32 key = load(k + p * rows.stride + d);
      FT_UNROLL
      for (int g = 0; g < G; ++g) sums[p][g] = fma(query[g], key, sums[p][g]);
    }
  };
  std::int64_t d = 0;
  for (; d + kW <= rows.dim; d += kW) step([](const float* at) { return F32::load(at); }, d);
  if (d < rows.dim) {
    const int rest = static_cast<int>(rows.dim - d);
    step([rest](const float* at) { return F32::load_partial(at, rest); }, d);
  }
  FT_UNROLL
  for (int p = 0; p < P; ++p) {
    FT_UNROLL
    for (int g = 0; g < G; ++g) scores[g * score_stride + p] = hsum(sums[p][g]) * scale;
  }
}

template <int P>
inline void score_rows(const float* q, std::int64_t group, const float* k, const CachedRows& rows,
                       float scale, float* scores, std::int64_t score_stride) {
  std::int64_t g = 0;
  for (; g + 2 <= group; g += 2) {
    score_tile<P, 2>(q + g * rows.dim, k, rows, scale, scores + g * score_stride, score_stride);
  }
  if (g < group) score_tile<P, 1>(q + g * rows.dim, k, rows, scale, scores + g * score_stride, score_stride);
}

void attention_scores(const float* q, std::int64_t group, const CachedRows& keys, float scale, float* scores,
                      std::int64_t score_stride) {
  std::int64_t p = 0;
  for (; p + 4 <= keys.count; p += 4) {
    score_rows<4>(q, group, keys.first + p * keys.stride, keys, scale, scores + p, score_stride);
  }
  for (; p < keys.count; ++p) {
    score_rows<1>(q, group, keys.first + p * keys.stride, keys, scale, scores + p, score_stride);
  }
}

// V vectors of the outputs of G queries, kept in registers over all rows.
template <int V, int G>
inline void value_tile(const float* weights, std::int64_t weight_stride, const CachedRows& values, float* out,
                       std::int64_t d) {
  F32 sums[G][V];
  FT_UNROLL
  for (int g = 0; g < G; ++g) {
    FT_UNROLL
    for (int v = 0; v < V; ++v) sums[g][v] = F32::load(out + g * values.dim + d + v * kW);
  }
  for (std::int64_t p = 0; p < values.count; ++p) {
    const float* row = values.first + p * values.stride + d;
    F32 weight[G];
    FT_UNROLL
    for (int g = 0; g < G; ++g) weight[g] = F32::broadcast(weights[g * weight_stride + p]);
    FT_UNROLL
    for (int v = 0; v < V; ++v) {
      const F32 value = F32::load(row + v * kW);
      FT_UNROLL
      for (int g = 0; g < G; ++g) sums[g][v] = fma(weight[g], value, sums[g][v]);
    }
  }
  FT_UNROLL
  for (int g = 0; g < G; ++g) {
    FT_UNROLL
    for (int v = 0; v < V; ++v) sums[g][v].store(out + g * values.dim + d + v * kW);
  }
}

template <int G>
inline void value_rows(const float* weights, std::int64_t weight_stride, const CachedRows& values,
                       float* out) {
  std::int64_t d = 0;
  for (; d + 4 * kW <= values.dim; d += 4 * kW) value_tile<4, G>(weights, weight_stride, values, out, d);
  for (; d + kW <= values.dim; d += kW) value_tile<1, G>(weights, weight_stride, values, out, d);
  if (d == values.dim) return;
  const int rest = static_cast<int>(values.dim - d);
  FT_UNROLL
  for (int g = 0; g < G; ++g) {
    F32 sum = F32::load_partial(out + g * values.dim + d, rest);
    for (std::int64_t p = 0; p < values.count; ++p) {
      const F32 value = F32::load_partial(values.first + p * values.stride + d, rest);
      sum = fma(F32::broadcast(weights[g * weight_stride + p]), value, sum);
    }
    sum.store_partial(out + g * values.dim + d, rest);
  }
}

void attention_values(const float* weights, std::int64_t weight_stride, std::int64_t group,
                      const CachedRows& values, float* out) {
  std::int64_t g = 0;
  for (; g + 2 <= group; g += 2) {
    value_rows<2>(weights + g * weight_stride, weight_stride, values, out + g * values.dim);
  }
  if (g < group) value_rows<1>(weights + g * weight_stride, weight_stride, values, out + g * values.dim);
}

#undef FT_UNROLL

}  // namespace
}  // namespace ft::FT_ISA_NAMESPACE
