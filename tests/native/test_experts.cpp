// The expert task: against a plain reference, and bit for bit against itself in every arrangement.
#include <algorithm>
#include <cstring>
#include <limits>

#include "check.h"
#include "core/pool.h"
#include "experts_support.h"
#include "ops/ops.h"
#include "weights.h"

using namespace experts;
using ft::Format;
using ft::KernelSet;
using weights::random_floats;
using weights::Weights;

namespace {

double gated(const ft::GatedActivation& a, double g, double u) {
  switch (a.kind) {
    case ft::Activation::SiLU: return g / (1 + std::exp(-g)) * u;
    case ft::Activation::GELU: return g * std::erfc(-g / std::sqrt(2.0)) / 2 * u;
    case ft::Activation::GELUTanh:
      return g * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (g + 0.044715 * g * g * g))) / 2 * u;
    case ft::Activation::ClampedSwiGLU: {
      const double c = std::min<double>(g, a.limit), d = std::clamp<double>(u, -a.limit, a.limit);
      return c / (1 + std::exp(-static_cast<double>(a.alpha) * c)) * (d + 1);
    }
    case ft::Activation::ReLUSquared: return std::max(g, 0.0) * std::max(g, 0.0) * u;
  }
  return std::nan("");
}

Batch token_of(const Batch& b, std::int64_t hidden, std::int64_t t) {
  return {1, b.top_k, {b.x.begin() + t * hidden, b.x.begin() + (t + 1) * hidden},
          {b.weights.begin() + t * b.top_k, b.weights.begin() + (t + 1) * b.top_k},
          {b.ids.begin() + t * b.top_k, b.ids.begin() + (t + 1) * b.top_k}};
}

// x as a matrix of this format reads it.
std::vector<double> as_read(Format format, const std::vector<float>& given, ft::Precision precision) {
  const std::vector<float> x =
      format == Format::DS_FP4 ? weights::fp8_rounded(given, given.size()) : given;
  std::vector<double> r(x.begin(), x.end());
  if (!weights::quantized(format) || precision == ft::Precision::Exact) return r;
  const weights::Int8 int8 = weights::to_int8(x);
  for (std::size_t i = 0; i < x.size(); ++i) r[i] = int8.q[i] * static_cast<double>(int8.d[i / 32]);
  return r;
}

double row_dot(const Weights& w, std::int64_t row, const std::vector<double>& x) {
  double sum = 0;
  for (std::int64_t c = 0; c < w.matrix.cols; ++c) sum += w.at(row, c) * x[static_cast<std::size_t>(c)];
  return sum * w.matrix.factor;
}

// One token in double, but for the int8 rounding of the inner activations. The magnitude of the terms of
// each output comes along for the tolerance.
void reference(const Layer& layer, const Batch& b, std::vector<double>& y, std::vector<double>& size,
               ft::Precision precision = ft::Precision::Int8) {
  const std::int64_t hidden = layer.bank.gate.cols, inner = layer.bank.gate.rows;
  y.assign(static_cast<std::size_t>(hidden), 0.0);
  size = y;
  for (std::size_t k = 0; k < b.ids.size(); ++k) {
    if (b.ids[k] < 0 || b.weights[k] == 0.0f) continue;
    const auto e = static_cast<std::size_t>(b.ids[k]);
    const std::vector<double> x_gate = as_read(layer.bank.gate.format, b.x, precision);
    const std::vector<double> x_up = as_read(layer.bank.up.format, b.x, precision);
    std::vector<float> inner_values;
    for (std::int64_t r = 0; r < inner; ++r) {
      const double g = row_dot(layer.gate[e], r, x_gate) + layer.bias(0, b.ids[k], r);
      const double u = row_dot(layer.up[e], r, x_up) + layer.bias(1, b.ids[k], r);
      inner_values.push_back(static_cast<float>(gated(layer.bank.activation, g, u)));
    }
    const std::vector<double> read = as_read(layer.bank.down.format, inner_values, precision);
    double norm = 0;
    for (const double v : read) norm += v * v;
    const double weight = b.weights[k];
    for (std::int64_t r = 0; r < hidden; ++r) {
      double row_norm = 0;
      for (std::int64_t c = 0; c < inner; ++c) row_norm += layer.down[e].at(r, c) * layer.down[e].at(r, c);
      y[static_cast<std::size_t>(r)] += weight * (row_dot(layer.down[e], r, read) + layer.bias(2, b.ids[k], r));
      size[static_cast<std::size_t>(r)] += std::abs(weight * layer.down[e].matrix.factor) * std::sqrt(norm * row_norm);
    }
  }
}

}  // namespace

// The inner activations of kernel and reference differ by float32 rounding, e ~ 1e-5 of their size, which
// moves an int8 value at a rounding boundary by one step: 1/127 of its block's largest value. That hits at
// most a few of the 64 values here, so the output moves by less than 4 / 127 of |w| |inner|; floats agree
// to their rounding.
TEST(experts_match_the_reference_for_every_format_and_top_k) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{17, 96, 64};
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kAll) {
      const Layer layer = make_layer(format, format, format, shape, format == Format::Q4_0, 100);
      for (const std::int64_t top_k : {1, 2, 3, 8, 16}) {
        const Batch batch = make_batch(shape, 3, top_k, 7);
        const std::vector<double> y = run(pool, *kernels, layer, batch);
        for (std::int64_t t = 0; t < batch.tokens; ++t) {
          std::vector<double> want, size;
          reference(layer, token_of(batch, shape.hidden, t), want, size);
          for (std::size_t h = 0; h < want.size(); ++h) {
            const double relative = weights::quantized(format) ? 0.03 : 2e-5;
            CHECK_NEAR(y[static_cast<std::size_t>(t * shape.hidden) + h], want[h], relative * size[h]);
          }
        }
      }
    }
  }
}

// Only the FP8 rounding of DS_FP4 is left: at a boundary it moves an inner value by an eighth of itself.
TEST(exact_activations_and_factors) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{3, 96, 64};
  for (const KernelSet* kernels : weights::kernel_sets(ft::Precision::Exact)) {
    for (const Format format : weights::kAll) {
      const Layer layer = make_layer(format, format, format, shape, false, 900, 1.5f);
      const Batch batch = make_batch(shape, 5, 2, 19);
      const std::vector<double> y = run(pool, *kernels, layer, batch);
      for (std::int64_t t = 0; t < batch.tokens; ++t) {
        std::vector<double> want, size;
        reference(layer, token_of(batch, shape.hidden, t), want, size, ft::Precision::Exact);
        for (std::size_t h = 0; h < want.size(); ++h) {
          const double relative = format == Format::DS_FP4 ? 0.03 : 2e-5;
          CHECK_NEAR(y[static_cast<std::size_t>(t * shape.hidden) + h], want[h], relative * size[h]);
        }
      }
    }
  }
}

TEST(parts_of_different_formats_and_odd_sizes) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Format mixes[][3] = {{Format::Q4_0, Format::Q8_0, Format::BF16},
                             {Format::F32, Format::Q4_1, Format::Q8_0},
                             {Format::DS_FP4, Format::Q8_0, Format::DS_FP4},
                             {Format::FP8_128, Format::NVFP4_PAIRS, Format::MXFP4},
                             {Format::BF16, Format::F16, Format::F32}};
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const auto& mix : mixes) {
      const bool floats = !weights::quantized(mix[0]) && !weights::quantized(mix[1]);
      const Shape shape{3, floats ? 37 : 96, weights::quantized(mix[2]) ? 160 : 45};
      const Layer layer = make_layer(mix[0], mix[1], mix[2], shape, false, 3);
      const Batch batch = make_batch(shape, 2, 2, 9);
      const std::vector<double> y = run(pool, *kernels, layer, batch);
      for (std::int64_t t = 0; t < 2; ++t) {
        std::vector<double> want, size;
        reference(layer, token_of(batch, shape.hidden, t), want, size);
        for (std::size_t h = 0; h < want.size(); ++h) {
          CHECK_NEAR(y[static_cast<std::size_t>(t * shape.hidden) + h], want[h], 0.03 * size[h]);
        }
      }
    }
  }
}

// An inner value now is of the order of 10, so that limits and cubes matter.
TEST(every_activation_with_and_without_biases) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{4, 96, 64};
  const ft::GatedActivation activations[] = {{ft::Activation::GELU},
                                             {ft::Activation::GELUTanh},
                                             {ft::Activation::ClampedSwiGLU},
                                             {ft::Activation::ClampedSwiGLU, 1.1f, 0.5f},
                                             {ft::Activation::ReLUSquared},
                                             {ft::Activation::SiLU}};
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : {Format::F32, Format::Q8_0}) {
      for (const bool biased : {false, true}) {
        Layer layer = make_layer(format, format, format, shape, true, 150);
        if (biased) add_biases(layer, 70);
        for (const ft::GatedActivation& activation : activations) {
          layer.bank.activation = activation;
          const Batch batch = make_batch(shape, 3, 3, 8);
          const std::vector<double> y = run(pool, *kernels, layer, batch);
          for (std::int64_t t = 0; t < batch.tokens; ++t) {
            std::vector<double> want, size;
            reference(layer, token_of(batch, shape.hidden, t), want, size);
            for (std::size_t h = 0; h < want.size(); ++h) {
              const double relative = weights::quantized(format) ? 0.03 : 2e-5;
              CHECK_NEAR(y[static_cast<std::size_t>(t * shape.hidden) + h], want[h], relative * (size[h] + 1));
            }
          }
        }
      }
    }
  }
}

// What a hybrid step does: some routes here, the others there. Sums of a handful of float32 terms are
// exact in float64, so nothing shows of how they were divided or ordered.
TEST(any_division_of_the_routes_adds_up_to_the_same_bits) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{16, 96, 64};
  for (const KernelSet* kernels : weights::kernel_sets()) {
    const Layer layer = make_layer(Format::Q4_0, Format::Q8_0, Format::BF16, shape, false, 250);
    for (const std::int64_t top_k : {3, 4, 8, 16}) {
      const Batch all = make_batch(shape, 3, top_k, 19);
      const std::vector<double> want = run(pool, *kernels, layer, all);
      std::mt19937 rng(5);
      for (int round = 0; round < 8; ++round) {
        Batch parts[3] = {all, all, all};
        for (std::size_t route = 0; route < all.ids.size(); ++route) {
          const unsigned part = rng() % 3;
          for (unsigned p = 0; p < 3; ++p) {
            if (p != part) parts[p].ids[route] = -1;
          }
        }
        std::vector<double> sum(want.size(), 0.0);
        for (const Batch& part : parts) {
          const std::vector<double> y = run(pool, *kernels, layer, part);
          for (std::size_t i = 0; i < y.size(); ++i) sum[i] += y[i];
        }
        CHECK(sum == want);
      }
    }
  }
}

TEST(a_token_gets_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads) {
  ft::ThreadPool one(std::vector<int>{0}), three(std::vector<int>{0, 0, 0});
  const Shape shape{7, 224, 160};
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kAll) {
      const Layer layer = make_layer(format, format, format, shape, false, 200);
      const Batch batch = make_batch(shape, 200, 3, 11);   // groups of over 64 tokens
      const std::vector<double> y = run(three, *kernels, layer, batch);
      CHECK(std::memcmp(y.data(), run(one, *kernels, layer, batch).data(), y.size() * sizeof y[0]) == 0);
      for (const std::int64_t t : {0, 1, 63, 64, 199}) {
        const std::vector<double> alone = run(three, *kernels, layer, token_of(batch, shape.hidden, t));
        CHECK(std::memcmp(alone.data(), y.data() + t * shape.hidden, alone.size() * sizeof alone[0]) == 0);
      }
    }
  }
}

TEST(planes_and_interleaved_blocks_give_the_same_bits) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{4, 96, 64};
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kQuantized) {
      const Layer planes = make_layer(format, format, format, shape, true, 300);
      Layer mapped = make_layer(format, format, format, shape, false, 1);
      const auto copy = [](const std::vector<Weights>& from, std::vector<Weights>& to) {
        for (std::size_t e = 0; e < from.size(); ++e) {
          const ft::PackedMatrix &a = from[e].matrix, &b = to[e].matrix;
          const ft::FormatInfo& info = ft::format_info(a.format);
          for (std::int64_t r = 0; r < a.rows; ++r) {
            for (std::int64_t i = 0; i < a.cols / 32; ++i) {
              auto* codes = const_cast<std::uint8_t*>(b.codes);
              auto* scales = const_cast<std::uint8_t*>(b.scales);
              std::memcpy(codes + r * b.code_row_stride + i * b.code_block_stride,
                          a.codes + r * a.code_row_stride + i * a.code_block_stride,
                          static_cast<std::size_t>(info.codes_bytes));
              std::memcpy(scales + r * b.scale_row_stride + i * b.scale_block_stride,
                          a.scales + r * a.scale_row_stride + i * a.scale_block_stride,
                          static_cast<std::size_t>(info.scales_bytes));
            }
          }
        }
      };
      copy(planes.gate, mapped.gate);
      copy(planes.up, mapped.up);
      copy(planes.down, mapped.down);
      for (const std::int64_t tokens : {1, 6}) {
        const Batch batch = make_batch(shape, tokens, 2, 13);
        CHECK(run(pool, *kernels, planes, batch) == run(pool, *kernels, mapped, batch));
      }
    }
  }
}

TEST(skipped_routes_leave_no_trace) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{6, 64, 64};
  const KernelSet& kernels = ft::select_kernels(nullptr);
  const Layer layer = make_layer(Format::Q4_0, Format::Q4_0, Format::Q4_0, shape, false, 400);
  Batch batch = make_batch(shape, 4, 4, 15);
  for (std::size_t k = 0; k < 4; ++k) batch.ids[4 + k] = -1;        // token 1: no routes
  for (std::size_t k = 0; k < 4; ++k) batch.weights[8 + k] = 0.0f;  // token 2: all weights zero
  batch.ids[13] = -1;                                               // token 3: two of four
  batch.weights[14] = 0.0f;
  const std::vector<double> y = run(pool, kernels, layer, batch);
  for (std::size_t i = 64; i < 192; ++i) CHECK(y[i] == 0.0 && !std::signbit(y[i]));
  Batch kept = token_of(batch, 64, 3);
  kept.top_k = 2;
  kept.ids = {batch.ids[12], batch.ids[15]};
  kept.weights = {batch.weights[12], batch.weights[15]};
  const std::vector<double> want = run(pool, kernels, layer, kept);
  CHECK(std::memcmp(want.data(), y.data() + 192, 64 * sizeof y[0]) == 0);
}

TEST(a_batch_without_routes_is_zero) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{2, 64, 32};
  const Layer layer = make_layer(Format::Q8_0, Format::Q8_0, Format::Q8_0, shape, false, 1);
  Batch batch = make_batch(shape, 3, 2, 1);
  for (std::int32_t& id : batch.ids) id = -1;
  for (const double v : run(pool, ft::select_kernels(nullptr), layer, batch)) CHECK_EQ(v, 0.0);
}

TEST(a_token_may_name_an_expert_twice) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{3, 64, 32};
  const KernelSet& kernels = ft::select_kernels(nullptr);
  const Layer layer = make_layer(Format::Q8_0, Format::Q8_0, Format::Q8_0, shape, false, 5);
  const std::vector<float> x = random_floats(64, 3);
  const std::vector<double> twice = run(pool, kernels, layer, {1, 2, x, {0.25f, 0.5f}, {1, 1}});
  const std::vector<double> once = run(pool, kernels, layer, {1, 1, x, {0.75f}, {1}});
  for (std::size_t i = 0; i < 64; ++i) CHECK_NEAR(twice[i], once[i], 1e-6 * std::abs(once[i]));
}

TEST(what_is_not_finite_stays_with_its_token) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{5, 96, 64};
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kAll) {
      const Layer layer = make_layer(format, format, format, shape, false, 500);
      Batch batch = make_batch(shape, 5, 2, 17);
      const std::vector<double> clean = run(pool, *kernels, layer, batch);
      for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
        batch.x[2 * 96 + 33] = bad;
        const std::vector<double> y = run(pool, *kernels, layer, batch);
        for (std::size_t i = 0; i < y.size(); ++i) {
          if (i / 96 == 2) CHECK(!std::isfinite(y[i]));
          else CHECK_EQ(y[i], clean[i]);
        }
      }
    }
  }
}

TEST(a_submitted_task_gives_the_same_bits) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{9, 128, 96};
  const KernelSet& kernels = ft::select_kernels(nullptr);
  const Layer layer = make_layer(Format::Q4_0, Format::Q4_0, Format::Q8_0, shape, false, 600);
  for (unsigned round = 0; round < 20; ++round) {
    const Batch batch = make_batch(shape, 1 + round % 5, 4, round);
    const std::vector<double> want = run(pool, kernels, layer, batch);
    std::vector<double> y(want.size());
    const ft::ExpertArgs args{&layer.bank, batch.x.data(), batch.ids.data(), batch.weights.data(), y.data(),
                              batch.tokens, batch.top_k};
    const auto ticket = pool.submit(ft::make_expert_task(kernels, args, pool.teams()));
    pool.wait(*ticket);
    CHECK(y == want);
  }
}

TEST(progress_moves_with_every_expert) {   // a watchdog looks at it
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{9, 128, 96};
  const KernelSet& kernels = ft::select_kernels(nullptr);
  const Layer layer = make_layer(Format::Q4_0, Format::Q4_0, Format::Q8_0, shape, false, 650);
  const Batch batch = make_batch(shape, 1, 7, 1);
  std::vector<double> y(batch.x.size());
  std::atomic<std::uint64_t> progress{0};
  const ft::ExpertArgs args{&layer.bank, batch.x.data(), batch.ids.data(), batch.weights.data(), y.data(),
                            batch.tokens, batch.top_k, &progress};
  pool.run(*ft::make_expert_task(kernels, args, pool.teams()));
  CHECK(progress.load() > 7);   // gate and up of each, then the tiles of down
  CHECK(y == run(pool, kernels, layer, batch));
}

TEST(an_expert_that_does_not_exist_is_named) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{3, 32, 32};
  const Layer layer = make_layer(Format::F32, Format::F32, Format::F32, shape, false, 700);
  for (const std::int32_t bad : {-2, 3}) {
    Batch batch = make_batch(shape, 2, 2, 1);
    batch.ids[3] = bad;
    CHECK_THROWS(run(pool, ft::select_kernels(nullptr), layer, batch), std::invalid_argument,
                 "route 1 of token 1 has expert id " + std::to_string(bad) + ", expected -1 or 0 to 2");
  }
}

TEST(a_task_for_fewer_lanes_than_there_are_is_refused) {
  ft::ThreadPool pool(std::vector<int>{0, 0});
  const Shape shape{1, 32, 32};
  const Layer layer = make_layer(Format::F32, Format::F32, Format::F32, shape, false, 800);
  const Batch b = make_batch(shape, 1, 1, 1);
  std::vector<double> y(32);
  const ft::ExpertArgs args{&layer.bank, b.x.data(), b.ids.data(), b.weights.data(), y.data(), 1, 1};
  CHECK_THROWS(pool.run(*ft::make_expert_task(ft::select_kernels(nullptr), args, {{{0, 0, 1}}})), std::logic_error,
               "made for 1 lanes runs on 2");
}

FT_TEST_MAIN
