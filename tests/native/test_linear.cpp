#include <cstring>
#include <numeric>

#include "check.h"
#include "core/pool.h"
#include "ops/ops.h"
#include "weights.h"

using ft::Format;
using ft::KernelSet;
using weights::random_floats;
using weights::random_weights;
using weights::Weights;

namespace {

std::vector<int> cpus(int n) { return std::vector<int>(static_cast<std::size_t>(n), 0); }

std::vector<float> linear(ft::ThreadPool& pool, const KernelSet& kernels, const Weights& w,
                          const std::vector<float>& x, const float* bias) {
  const std::int64_t tokens = static_cast<std::int64_t>(x.size()) / w.matrix.cols;
  std::vector<float> y(static_cast<std::size_t>(tokens * w.matrix.rows), -1.0f);
  const ft::LinearPart part{&w.matrix, bias, y.data()};
  ft::linear(pool, kernels, {&part, 1}, x.data(), tokens);
  return y;
}

}  // namespace

TEST(linear_is_the_product_with_the_bias_added) {
  ft::ThreadPool pool(cpus(2));
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kAll) {
      for (const std::int64_t rows : {5, 71}) {   // alone on the caller, and shared out
        for (const std::int64_t tokens : {1, 3, 131}) {
          constexpr std::int64_t kCols = 96;
          const Weights w = random_weights(format, rows, kCols, 1);
          const std::vector<float> x = random_floats(tokens * kCols, 2);
          const std::vector<float> bias = random_floats(rows, 3);
          const std::vector<float> y = linear(pool, *kernels, w, x, bias.data());
          const weights::Int8 int8 =
              weights::to_int8(format == Format::DS_FP4 ? weights::fp8_rounded(x, kCols) : x);
          for (std::int64_t t = 0; t < tokens; ++t) {
            for (std::int64_t r = 0; r < rows; ++r) {
              double sum = bias[static_cast<std::size_t>(r)], size = std::abs(sum);
              for (std::int64_t c = 0; c < kCols; ++c) {
                const auto i = static_cast<std::size_t>(t * kCols + c);
                const double rounded = int8.q[i] * static_cast<double>(int8.d[i / 32]);
                const double xi = weights::quantized(format) ? rounded : x[i];
                sum += w.at(r, c) * xi;
                size += std::abs(w.at(r, c) * xi) + 16 * std::abs(xi) * std::ldexp(1, -3);   // minima of Q4_1
              }
              CHECK_NEAR(y[static_cast<std::size_t>(t * rows + r)], sum, 100 * 6e-8 * size);
            }
          }
        }
      }
    }
  }
}

// Several matrices share the tokens, in a form for each kind of format: the same bits as one by one.
TEST(matrices_of_different_formats_share_their_tokens) {
  ft::ThreadPool pool(cpus(2));
  constexpr Format kMixed[] = {Format::Q8_0, Format::DS_FP4, Format::BF16, Format::Q4_0, Format::DS_FP4};
  for (const ft::Precision precision : {ft::Precision::Int8, ft::Precision::Exact}) {
    for (const KernelSet* kernels : weights::kernel_sets(precision)) {
      for (const std::int64_t tokens : {1, 9}) {
        constexpr std::int64_t kCols = 192;
        const std::vector<float> x = random_floats(tokens * kCols, 11);
        std::vector<Weights> matrices;
        std::vector<std::vector<float>> ys;
        std::vector<ft::LinearPart> parts;
        for (const Format format : kMixed) {
          matrices.push_back(random_weights(format, 70, kCols, static_cast<unsigned>(12 + matrices.size())));
          ys.emplace_back(static_cast<std::size_t>(tokens * 70));
        }
        for (std::size_t i = 0; i < matrices.size(); ++i) {
          parts.push_back({&matrices[i].matrix, nullptr, ys[i].data()});
        }
        ft::linear(pool, *kernels, parts, x.data(), tokens);
        for (std::size_t i = 0; i < matrices.size(); ++i) {
          CHECK(ys[i] == linear(pool, *kernels, matrices[i], x, nullptr));
        }
      }
    }
  }
}

TEST(linear_does_not_depend_on_the_batch_or_the_threads) {
  ft::ThreadPool one(cpus(1)), three(cpus(3));
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kAll) {
      constexpr std::int64_t kRows = 77, kCols = 160, kTokens = 150;
      const Weights w = random_weights(format, kRows, kCols, 4);
      const std::vector<float> x = random_floats(kTokens * kCols, 5);
      const std::vector<float> bias = random_floats(kRows, 6);
      const std::vector<float> all = linear(three, *kernels, w, x, bias.data());
      CHECK(std::memcmp(all.data(), linear(one, *kernels, w, x, bias.data()).data(), all.size() * 4) == 0);
      for (const std::int64_t t : {0, 1, 127, 128, 149}) {
        const std::vector<float> token(x.begin() + t * kCols, x.begin() + (t + 1) * kCols);
        const std::vector<float> alone = linear(three, *kernels, w, token, bias.data());
        CHECK(std::memcmp(alone.data(), all.data() + t * kRows, kRows * 4) == 0);
      }
    }
  }
}

TEST(embed_gives_dequantised_rows) {
  ft::ThreadPool pool(cpus(2));
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kAll) {
      constexpr std::int64_t kRows = 40, kCols = 64;
      const Weights w = random_weights(format, kRows, kCols, 7);
      std::vector<std::int64_t> ids(2000);
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * 7 % kRows);
      std::vector<float> y(ids.size() * kCols);
      ft::embed(pool, *kernels, w.matrix, ids.data(), y.data(), static_cast<std::int64_t>(ids.size()));
      for (std::size_t i = 0; i < y.size(); ++i) {
        const double exact = w.at(ids[i / kCols], static_cast<std::int64_t>(i % kCols));
        const bool rounds = format == Format::Q4_1 || format == Format::FP8_128;
        CHECK_NEAR(y[i], exact, rounds ? 1e-6 : 0);
      }
    }
  }
}

TEST(embed_names_an_id_outside_of_the_table) {
  ft::ThreadPool pool(cpus(1));
  const Weights w = random_weights(Format::Q8_0, 4, 32, 8);
  std::vector<float> y(64);
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{4}}) {
    const std::int64_t ids[] = {3, bad};
    CHECK_THROWS(ft::embed(pool, ft::select_kernels(nullptr), w.matrix, ids, y.data(), 2),
                 std::invalid_argument,
                 "token 1 has id " + std::to_string(bad) + ", but the embedding has rows 0 to 3");
  }
}

FT_TEST_MAIN
