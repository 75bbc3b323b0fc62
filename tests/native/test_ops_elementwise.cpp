// Norms, SiLU, exponentials, rotary embedding, KV writes and the vector kernels beneath them, for
// every instruction set of the host, against double precision.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "ops_support.h"

using namespace ft;
using ops_support::all_kernels;
using ops_support::pools;
using ops_support::random_floats;

namespace {
const float kInf = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();
const std::vector<std::int64_t> kSizes = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 64, 100, 576, 1023};
}  // namespace

TEST(exp_is_accurate_over_the_whole_range) {
  for (const KernelSet* kernels : all_kernels()) {
    std::vector<float> x;
    for (float v = -87.0f; v < 88.5f; v += 0.00731f) x.push_back(v);
    std::vector<float> y = x;
    kernels->exp_sum(y.data(), 0.0f, static_cast<std::int64_t>(y.size()));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double exact = std::exp(static_cast<double>(x[i]));
      CHECK_NEAR(y[i] / exact, 1.0, 2e-7);
    }
  }
}

TEST(exp_handles_extremes) {
  for (const KernelSet* kernels : all_kernels()) {
    for (const std::int64_t at : {0, 3, 8, 18}) {   // in whole vectors and in the remainder
      const auto exp_of = [&](float value) {
        std::vector<float> x(19, -1.0f);
        x[static_cast<std::size_t>(at)] = value;
        kernels->exp_sum(x.data(), 0.0f, 19);
        return x[static_cast<std::size_t>(at)];
      };
      CHECK_EQ(exp_of(-kInf), 0.0f);
      CHECK_EQ(exp_of(-1e30f), 0.0f);
      CHECK_EQ(exp_of(-200.0f), 0.0f);
      CHECK_NEAR(exp_of(-100.0f), std::exp(-100.0), 3e-45);   // subnormal
      CHECK_EQ(exp_of(0.0f), 1.0f);
      CHECK_EQ(exp_of(-0.0f), 1.0f);
      CHECK_EQ(exp_of(89.0f), kInf);
      CHECK_EQ(exp_of(1e30f), kInf);
      CHECK_EQ(exp_of(kInf), kInf);
      CHECK(std::isnan(exp_of(kNaN)));
    }
  }
}

TEST(exp_sum_adds_what_it_stores) {
  for (const KernelSet* kernels : all_kernels()) {
    for (const std::int64_t n : kSizes) {
      std::vector<float> x = random_floats(n, 1, 3.0f);
      const float largest = *std::max_element(x.begin(), x.end());
      CHECK_EQ(kernels->max_f32(x.data(), n), largest);
      const float sum = kernels->exp_sum(x.data(), largest, n);
      double exact = 0.0;
      for (const float v : x) exact += v;
      CHECK_NEAR(sum / exact, 1.0, 1e-6);
      CHECK_EQ(*std::max_element(x.begin(), x.end()), 1.0f);
    }
  }
}

TEST(max_of_negative_and_infinite_numbers) {
  for (const KernelSet* kernels : all_kernels()) {
    CHECK_EQ(kernels->max_f32(nullptr, 0), -kInf);
    for (const std::int64_t n : kSizes) {
      std::vector<float> x(static_cast<std::size_t>(n), -kInf);
      CHECK_EQ(kernels->max_f32(x.data(), n), -kInf);
      x.back() = -5.0f;
      CHECK_EQ(kernels->max_f32(x.data(), n), -5.0f);
      x.front() = kInf;
      CHECK_EQ(kernels->max_f32(x.data(), n), kInf);
      for (std::size_t at = 1; at < x.size(); ++at) {   // NaN entries are passed over
        std::vector<float> with_nan = x;
        with_nan[at] = kNaN;
        CHECK_EQ(kernels->max_f32(with_nan.data(), n), kInf);
      }
    }
  }
}

TEST(add_and_add_scaled) {
  for (const KernelSet* kernels : all_kernels()) {
    for (const std::int64_t n : kSizes) {
      const std::vector<float> a = random_floats(n, 2), b = random_floats(n, 3);
      std::vector<float> added = b;
      std::vector<double> scaled(b.begin(), b.end());
      kernels->add(a.data(), added.data(), n);
      kernels->add_scaled(0.37f, a.data(), scaled.data(), n);
      for (std::size_t i = 0; i < a.size(); ++i) {
        CHECK_EQ(added[i], a[i] + b[i]);
        const volatile float product = 0.37f * a[i];   // volatile: no fused multiply-add here either
        CHECK_EQ(scaled[i], static_cast<double>(product) + b[i]);
      }
    }
  }
}

namespace {

double normal_tail(double a) { return std::erfc(a / std::sqrt(2.0)) / 2; }

double exact_gated(const GatedActivation& a, double g, double u) {
  switch (a.kind) {
    case Activation::SiLU: return g / (1 + std::exp(-g)) * u;
    case Activation::GELU: return g * normal_tail(-g) * u;
    case Activation::GELUTanh: {
      const double z = std::sqrt(2 / std::acos(-1.0)) * (g + 0.044715 * g * g * g);
      return g / (1 + std::exp(-2 * z)) * u;
    }
    case Activation::ClampedSwiGLU: {
      const double c = std::min<double>(g, a.limit), d = std::clamp<double>(u, -a.limit, a.limit);
      return c / (1 + std::exp(-static_cast<double>(a.alpha) * c)) * (d + 1);
    }
    case Activation::ReLUSquared: return std::pow(std::max(g, 0.0), 2) * u;
  }
  return kNaN;
}

const std::vector<GatedActivation> kGated = {{Activation::SiLU},
                                             {Activation::GELU},
                                             {Activation::GELUTanh},
                                             {Activation::ClampedSwiGLU},
                                             {Activation::ClampedSwiGLU, 0.7f, 1.5f},
                                             {Activation::ReLUSquared}};

float gated_of(const KernelSet& kernels, const GatedActivation& a, float gate, float up) {
  kernels.activate(a, &gate, &up, &gate, 1);
  return gate;
}

}  // namespace

// GELU's exponent -g^2 / 2 is rounded, which costs g^2 / 2 * 2^-24 of the result; its tanh form and the
// clamped unit round the argument of an exponential likewise. (d + 1) is rounded near d = -1.
TEST(gated_activations_match_on_the_whole_range) {
  for (const KernelSet* kernels : all_kernels()) {
    for (const GatedActivation& a : kGated) {
      std::vector<float> gate, up;
      for (float g = -13.0f; g < 13.0f; g += 0.00713f) {
        gate.push_back(g);
        up.push_back(std::sin(g * 37.0f) * 9.0f);
      }
      for (const float g : {0.0f, -0.0f, 1e-30f, -1e-30f, 1e-6f, -1e-6f}) {
        gate.push_back(g);
        up.push_back(1.0f);
      }
      std::vector<float> y(gate.size(), kNaN);
      kernels->activate(a, gate.data(), up.data(), y.data(), static_cast<std::int64_t>(gate.size()));
      for (std::size_t i = 0; i < gate.size(); ++i) {
        const double exact = exact_gated(a, gate[i], up[i]);
        const double exponent = std::abs(gate[i]) * (1 + 0.1 * gate[i] * gate[i]);
        const double slack = a.kind == Activation::ClampedSwiGLU ? 1e-6 : 1e-36;   // exp overflows at 88.7
        CHECK_NEAR(y[i], exact, (1e-6 + 1.2e-7 * exponent) * std::abs(exact) + slack);
      }
    }
  }
}

TEST(gated_activations_are_the_same_for_any_length) {
  for (const KernelSet* kernels : all_kernels()) {
    for (const GatedActivation& a : kGated) {
      const std::vector<float> gate = random_floats(100, 4, 4.0f), up = random_floats(100, 5);
      std::vector<float> whole(100);
      kernels->activate(a, gate.data(), up.data(), whole.data(), 100);
      for (const std::int64_t n : kSizes) {
        if (n > 100) continue;
        std::vector<float> y = gate;   // in place
        kernels->activate(a, y.data(), up.data(), y.data(), n);
        for (std::int64_t i = 0; i < 100; ++i) CHECK_EQ(y[i], i < n ? whole[i] : gate[i]);
      }
    }
  }
}

TEST(gated_activations_of_large_numbers) {
  for (const KernelSet* kernels : all_kernels()) {
    for (const Activation kind : {Activation::SiLU, Activation::GELU, Activation::GELUTanh}) {
      for (const float g : {88.0f, 1e4f, 1e18f}) {
        CHECK_EQ(gated_of(*kernels, {kind}, g, 1.0f), g);
        CHECK_NEAR(gated_of(*kernels, {kind}, -g, 1.0f), 0.0, 1e-36);
      }
    }
    CHECK_NEAR(gated_of(*kernels, {Activation::ClampedSwiGLU}, 1e30f, -1e30f),
               7 / (1 + std::exp(-7 * 1.702)) * -6, 1e-5);
    CHECK_NEAR(gated_of(*kernels, {Activation::ClampedSwiGLU}, -1e30f, 3.0f), 0.0, 1e-36);
    CHECK_EQ(gated_of(*kernels, {Activation::ReLUSquared}, 1e10f, 2.0f), 1e10f * 1e10f * 2.0f);
    CHECK_EQ(gated_of(*kernels, {Activation::ReLUSquared}, -1e10f, 2.0f), 0.0f);
  }
}

TEST(no_activation_hides_what_is_not_finite) {
  for (const KernelSet* kernels : all_kernels()) {
    for (const GatedActivation& a : kGated) {
      for (const float bad : {kNaN, kInf, -kInf}) {
        CHECK(!std::isfinite(gated_of(*kernels, a, bad, 1.0f)));
        CHECK(!std::isfinite(gated_of(*kernels, a, 1.0f, bad)));
        std::vector<float> gate(19, 1.0f), y(19);
        const std::vector<float> up(19, 2.0f);
        gate[3] = bad;
        kernels->activate(a, gate.data(), up.data(), y.data(), 19);
        for (std::size_t i = 0; i < y.size(); ++i) CHECK_EQ(std::isfinite(y[i]), i != 3);
      }
    }
  }
}

TEST(gated_activations_do_not_depend_on_lanes) {
  for (const KernelSet* kernels : all_kernels()) {
    const std::int64_t n = 40 * 1024 + 13;
    const std::vector<float> gate = random_floats(n, 6, 4.0f), up = random_floats(n, 7);
    for (const GatedActivation& a : kGated) {
      std::vector<float> alone(gate.size());
      kernels->activate(a, gate.data(), up.data(), alone.data(), n);
      for (const auto& pool : pools()) {
        std::vector<float> y(gate.size(), kNaN);
        gated_activation(*pool, *kernels, a, gate.data(), up.data(), y.data(), n);
        CHECK(y == alone);
      }
    }
  }
}

TEST(rms_norm_matches) {
  for (const KernelSet* kernels : all_kernels()) {
    for (const std::int64_t n : kSizes) {
      const std::vector<float> x = random_floats(3 * n, 8, 2.0f), weight = random_floats(n, 9);
      std::vector<float> y(x.size());
      rms_norm(*pools()[0], *kernels, x.data(), weight.data(), 1e-5f, y.data(), 3, n);
      for (std::int64_t row = 0; row < 3; ++row) {
        double squares = 0.0;
        for (std::int64_t i = 0; i < n; ++i) squares += std::pow(static_cast<double>(x[row * n + i]), 2);
        const double scale = 1.0 / std::sqrt(squares / static_cast<double>(n) + 1e-5);
        for (std::int64_t i = 0; i < n; ++i) {
          const double exact = x[row * n + i] * scale * weight[i];
          CHECK_NEAR(y[row * n + i], exact, 1e-6 * std::abs(exact) + 1e-12);
        }
      }
    }
  }
}

TEST(norms_do_not_depend_on_batch_or_lanes) {
  const std::int64_t rows = 37, n = 1000;
  for (const KernelSet* kernels : all_kernels()) {
    const std::vector<float> x = random_floats(rows * n, 10), residual = random_floats(rows * n, 11);
    const std::vector<float> weight = random_floats(n, 12);
    std::vector<float> sums = residual, norms(x.size()), second(x.size());
    for (std::int64_t row = 0; row < rows; ++row) {
      add_rms_norm(*pools()[0], *kernels, &x[row * n], &sums[row * n], weight.data(), 1e-6f,
                   &norms[row * n], 1, n);
      rms_norm(*pools()[0], *kernels, &sums[row * n], weight.data(), 1e-6f, &second[row * n], 1, n);
    }
    CHECK(norms == second);
    for (std::size_t i = 0; i < x.size(); ++i) CHECK_EQ(sums[i], x[i] + residual[i]);
    for (const auto& pool : pools()) {
      std::vector<float> to = residual, y(x.size(), kNaN);
      add_rms_norm(*pool, *kernels, x.data(), to.data(), weight.data(), 1e-6f, y.data(), rows, n);
      CHECK(to == sums);
      CHECK(y == norms);
    }
  }
}

TEST(a_bad_number_poisons_its_own_row_only) {
  for (const KernelSet* kernels : all_kernels()) {
    const std::int64_t n = 43;
    std::vector<float> x = random_floats(2 * n, 13), y(x.size());
    const std::vector<float> weight(static_cast<std::size_t>(n), 1.0f);
    x[40] = kNaN;
    rms_norm(*pools()[0], *kernels, x.data(), weight.data(), 1e-6f, y.data(), 2, n);
    for (std::int64_t i = 0; i < n; ++i) {
      CHECK(std::isnan(y[i]));
      CHECK(std::isfinite(y[n + i]));
    }
  }
}

TEST(rotary_rotates_both_pairings_and_leaves_the_rest) {
  for (const bool interleaved : {false, true}) {
    for (const std::int64_t rotary_dims : {2, 10, 40, 64}) {
      const std::int64_t tokens = 300, heads = 3, kv = 2, dim = 64, half = rotary_dims / 2;
      const std::vector<float> q0 = random_floats(tokens * heads * dim, 14);
      const std::vector<float> k0 = random_floats(tokens * kv * dim, 15);
      std::vector<float> cos(tokens * half), sin(tokens * half);
      for (std::size_t i = 0; i < cos.size(); ++i) {
        cos[i] = std::cos(0.37f * static_cast<float>(i));
        sin[i] = std::sin(0.37f * static_cast<float>(i));
      }
      for (const auto& pool : pools()) {
        std::vector<float> q = q0, k = k0;
        rotary(*pool, *all_kernels()[0],
               {q.data(), k.data(), cos.data(), sin.data(), tokens, heads, kv, dim, rotary_dims, interleaved});
        const auto check_heads = [&](const std::vector<float>& x0, const std::vector<float>& x, std::int64_t n) {
          for (std::int64_t row = 0; row < tokens * n; ++row) {
            const std::int64_t t = row / n;
            for (std::int64_t i = 0; i < half; ++i) {
              const std::int64_t a = row * dim + (interleaved ? 2 * i : i);
              const std::int64_t b = interleaved ? a + 1 : a + half;
              const double c = cos[t * half + i], s = sin[t * half + i];
              CHECK_NEAR(x[a], x0[a] * c - x0[b] * s, 1e-6);
              CHECK_NEAR(x[b], x0[b] * c + x0[a] * s, 1e-6);
            }
            for (std::int64_t d = rotary_dims; d < dim; ++d) CHECK_EQ(x[row * dim + d], x0[row * dim + d]);
          }
        };
        check_heads(q0, q, heads);
        check_heads(k0, k, kv);
      }
    }
  }
}

TEST(write_kv_stores_rows_where_slots_say) {
  const std::int64_t row = 6;
  const std::vector<float> k = random_floats(3 * row, 16), v = random_floats(3 * row, 17);
  std::vector<float> k_cache(8 * row, -7.0f), v_cache(8 * row, -7.0f);
  const std::vector<std::int64_t> slots = {5, 0, 7};
  write_kv(k.data(), v.data(), k_cache.data(), v_cache.data(), slots.data(), 3, row);
  for (std::int64_t s = 0; s < 8; ++s) {
    const auto found = std::find(slots.begin(), slots.end(), s);
    for (std::int64_t i = 0; i < row; ++i) {
      const std::int64_t from = (found - slots.begin()) * row + i;
      CHECK_EQ(k_cache[s * row + i], found == slots.end() ? -7.0f : k[from]);
      CHECK_EQ(v_cache[s * row + i], found == slots.end() ? -7.0f : v[from]);
    }
  }
}

FT_TEST_MAIN
