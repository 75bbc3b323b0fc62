// The kernels of every format on every instruction set of the host, against a double-precision reading
// of the same bytes.
#include <cfloat>
#include <limits>

#include "check.h"
#include "weights.h"

using ft::Format;
using ft::KernelSet;
using weights::random_floats;
using weights::random_weights;
using weights::Weights;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// x[T, cols] prepared as the operators do it.
struct Prepared {
  std::vector<float> f32;
  weights::Int8 int8;
  std::vector<std::uint8_t> raised;
  ft::Activations view;

  Prepared(const KernelSet& kernels, std::vector<float> x, std::int64_t cols) : f32(std::move(x)) {
    view = {cols, f32.data(), nullptr, nullptr, nullptr};
    if (cols % 32 != 0) return;
    int8.q.resize(f32.size());
    int8.d.resize(f32.size() / 32);
    int8.sum.resize(f32.size() / 16);
    for (std::size_t at = 0; at < f32.size(); at += static_cast<std::size_t>(cols)) {
      kernels.format(Format::Q8_0).prepare(
          f32.data() + at, cols, {nullptr, int8.q.data() + at, int8.d.data() + at / 32, int8.sum.data() + at / 16});
    }
    view.q = int8.q.data();
    view.d = int8.d.data();
    view.sum = int8.sum.data();
    for (const std::int8_t q : int8.q) raised.push_back(static_cast<std::uint8_t>(q + 128));
    view.raised = raised.data();
  }
};

std::vector<float> dot(const KernelSet& kernels, const Weights& w, const Prepared& x, ft::TokenRange tokens) {
  std::vector<float> y(static_cast<std::size_t>(w.matrix.rows * tokens.count), -7.0f);
  kernels.format(w.matrix.format).dot(w.matrix, 0, w.matrix.rows, x.view, tokens, y.data(), w.matrix.rows);
  return y;
}

// What the kernel is to compute, in double, and a bound on its float32 rounding. With n terms added one
// after the other, each a product of up to three rounded factors, the error is at most (n + 4) eps / 2
// times the sum of the terms' magnitudes. For quantised formats a term is what is rounded: 16 or 32 columns
// with one scale, i.e. |d_w d_x dot| and |m d_x sum|.
struct Expected {
  double value = 0, tolerance = 0;
};

Expected expected(const Weights& w, const Prepared& x, std::int64_t row, std::int64_t token) {
  const std::int64_t cols = w.matrix.cols;
  const bool quantized = weights::quantized(w.matrix.format);
  const std::int64_t part =
      !quantized ? 1 : w.matrix.format == Format::Q6_K || weights::has_e4m3(w.matrix.format) ? 16 : 32;
  Expected e;
  double magnitude = 0;
  for (std::int64_t first = 0; first < cols; first += part) {
    double codes = 0, minimum = 0;
    for (std::int64_t c = first; c < first + part; ++c) {
      const auto i = static_cast<std::size_t>(token * cols + c);
      const double xi = quantized ? x.int8.q[i] * static_cast<double>(x.int8.d[i / 32]) : x.f32[i];
      const double m = w.minimum(row, c);
      codes += (w.at(row, c) - m) * xi;
      minimum += m * xi;
    }
    e.value += codes + minimum;
    magnitude += std::abs(codes) + 2 * std::abs(minimum);
  }
  e.tolerance = static_cast<double>(cols / part + 4) * FLT_EPSILON / 2 * magnitude + FLT_MIN;
  return e;
}

void check_dot(const KernelSet& kernels, const Weights& w, unsigned seed, std::int64_t tokens) {
  const Prepared x(kernels, random_floats(tokens * w.matrix.cols, seed), w.matrix.cols);
  const std::vector<float> y = dot(kernels, w, x, {nullptr, 0, tokens});
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t r = 0; r < w.matrix.rows; ++r) {
      const Expected e = expected(w, x, r, t);
      CHECK_NEAR(y[static_cast<std::size_t>(t * w.matrix.rows + r)], e.value, e.tolerance);
    }
  }
}

}  // namespace

TEST(quantized_activations_follow_their_definition) {
  std::vector<float> x = random_floats(32 * 6, 1);
  for (std::size_t i = 32; i < 64; ++i) x[i] = 0.0f;
  for (std::size_t i = 64; i < 96; ++i) x[i] *= 1e-38f;    // d is subnormal
  for (std::size_t i = 96; i < 128; ++i) x[i] *= 1e37f;
  for (std::size_t i = 128; i < 160; ++i) x[i] = static_cast<float>(i) - 143.5f;   // ties
  for (std::size_t i = 160; i < 192; ++i) x[i] = 1e-45f;   // d underflows to zero
  const weights::Int8 want = weights::to_int8(x);
  for (const KernelSet* kernels : weights::kernel_sets()) {
    const Prepared got(*kernels, x, 32 * 6);
    CHECK(got.int8.q == want.q);
    CHECK(got.int8.d == want.d);
    CHECK(got.int8.sum == want.sum);
  }
}

TEST(rows_dequantize_exactly) {
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kEvery) {
      for (const bool planes : {false, true}) {
        const std::int64_t cols = weights::columns(format, 32 * 9);
        const Weights w = random_weights(format, 5, cols, 2, planes, 0, 30);
        std::vector<float> y(static_cast<std::size_t>(cols));
        for (std::int64_t r = 0; r < 5; ++r) {
          kernels->format(format).dequantize_row(w.matrix, r, y.data());
          for (std::int64_t c = 0; c < cols; ++c) {
            // Codes times scales of few bits are exact in float32 too; adding a minimum rounds.
            const double exact = w.at(r, c);
            const bool rounds = w.minimum(r, c) != 0 || format == Format::FP8_128;
            const double tolerance = rounds ? std::abs(exact) * FLT_EPSILON : 0;
            CHECK_NEAR(y[static_cast<std::size_t>(c)], exact, tolerance);
          }
        }
      }
    }
  }
}

TEST(every_code_has_its_value) {   // unit activations pick out single weights
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kEveryQuantized) {
      const std::int64_t cols = weights::columns(format, 1);
      const ft::FormatInfo& info = ft::format_info(format);
      Weights w = random_weights(format, 256, cols, 3);
      for (int r = 0; r < 256; ++r) {   // every byte at every place
        for (std::int64_t b = 0; b < cols / info.block_elements; ++b) {
          auto* code = const_cast<std::uint8_t*>(w.matrix.codes + r * w.matrix.code_row_stride +
                                                 b * w.matrix.code_block_stride);
          std::memset(code, r, static_cast<std::size_t>(info.codes_bytes));
        }
      }
      for (std::int64_t c = 0; c < cols; ++c) {
        std::vector<float> x(static_cast<std::size_t>(cols), 0.0f);
        x[static_cast<std::size_t>(c)] = 127.0f;   // d = 1, q = 127
        const std::vector<float> y = dot(*kernels, w, Prepared(*kernels, x, cols), {nullptr, 0, 1});
        for (std::int64_t r = 0; r < 256; ++r) {
          const double exact = w.at(r, c), m = w.minimum(r, c);
          const double tolerance = FLT_EPSILON * 127 * (std::abs(exact - m) + std::abs(m));
          CHECK_NEAR(y[static_cast<std::size_t>(r)], 127 * exact, tolerance);
        }
      }
    }
  }
}

TEST(dots_match_the_reference_for_odd_shapes) {
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kEvery) {
      unsigned seed = 10;
      for (const std::int64_t rows : {1, 2, 7, 8, 9, 15, 33}) {
        for (const std::int64_t blocks : {1, 2, 3, 18, 65, 130}) {   // 65 and 130: several panels
          for (const bool planes : {false, true}) {
            const std::int64_t cols = weights::columns(format, blocks * 32);
            const Weights w = random_weights(format, rows, cols, ++seed, planes);
            check_dot(*kernels, w, seed, 1);
            check_dot(*kernels, w, seed, 6);
          }
        }
      }
    }
  }
}

TEST(float_rows_may_have_any_length) {
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : {Format::F32, Format::F16, Format::BF16, Format::FP8_128}) {
      for (std::int64_t cols = 1; cols <= 300; cols += cols < 41 ? 1 : 37) {
        const Weights w = random_weights(format, 7, cols, static_cast<unsigned>(cols));
        check_dot(*kernels, w, 5, 1);
        check_dot(*kernels, w, 5, 5);
      }
    }
  }
}

TEST(extreme_scales) {
  constexpr int kRanges[][2] = {{0, 0}, {1, 1}, {30, 30}, {0, 30}};   // subnormal, smallest, largest, all
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kEveryQuantized) {
      for (const auto& range : kRanges) {
        const std::int64_t cols = weights::columns(format, 32 * 7);
        const Weights w = random_weights(format, 9, cols, 77, false, range[0], range[1]);
        check_dot(*kernels, w, 6, 1);
        check_dot(*kernels, w, 6, 4);
      }
    }
  }
}

TEST(extreme_codes_do_not_saturate) {   // -128 and 15 against +-127 in all places
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kEveryQuantized) {
      for (const std::uint8_t code : {0x80, 0x7f, 0xff, 0x00}) {
        const std::int64_t cols = weights::columns(format, 64);
        Weights w = random_weights(format, 8, cols, 4, true);
        for (std::uint8_t& byte : w.codes) byte = code;
        for (const float x : {1.0f, -1.0f}) {
          for (const std::int64_t tokens : {1, 4}) {
            const std::vector<float> xs(static_cast<std::size_t>(cols * tokens), x);
            const Prepared prepared(*kernels, xs, cols);
            const std::vector<float> y = dot(*kernels, w, prepared, {nullptr, 0, tokens});
            for (std::int64_t t = 0; t < tokens; ++t) {
              for (std::int64_t r = 0; r < 8; ++r) {
                const Expected e = expected(w, prepared, r, t);
                CHECK_NEAR(y[static_cast<std::size_t>(t * 8 + r)], e.value, e.tolerance);
              }
            }
          }
        }
      }
    }
  }
}

TEST(a_token_that_is_not_finite_poisons_its_own_outputs_only) {
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kEvery) {
      const std::int64_t cols = weights::columns(format, 96);
      const Weights w = random_weights(format, 11, cols, 8);
      for (const float bad : {std::nanf(""), kInf, -kInf}) {
        for (const std::size_t place : {0u, 31u, 50u, 95u}) {
          std::vector<float> x = random_floats(5 * cols, 9);
          const std::vector<float> clean = dot(*kernels, w, Prepared(*kernels, x, cols), {nullptr, 0, 5});
          x[2 * static_cast<std::size_t>(cols) + place] = bad;
          const Prepared prepared(*kernels, x, cols);
          const std::vector<float> y = dot(*kernels, w, prepared, {nullptr, 0, 5});
          const std::vector<float> alone = dot(*kernels, w, prepared, {nullptr, 2, 1});
          for (std::size_t r = 0; r < 11; ++r) {
            CHECK(!std::isfinite(y[2 * 11 + r]));
            CHECK(!std::isfinite(alone[r]));
            for (const std::size_t t : {0u, 1u, 3u, 4u}) CHECK_EQ(y[t * 11 + r], clean[t * 11 + r]);
          }
        }
      }
    }
  }
}

TEST(a_result_does_not_depend_on_the_batch_or_the_rows_beside_it) {
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kEvery) {
      constexpr std::int64_t kRows = 43, kTokens = 13;
      const std::int64_t cols = weights::columns(format, 32 * 67);
      const Weights w = random_weights(format, kRows, cols, 20);
      const Prepared x(*kernels, random_floats(kTokens * cols, 21), cols);
      const std::vector<float> all = dot(*kernels, w, x, {nullptr, 0, kTokens});
      const std::int32_t list[] = {12, 3, 3, 0, 7};
      const std::vector<float> listed = dot(*kernels, w, x, {list, 0, 5});
      for (std::size_t j = 0; j < 5; ++j) {
        for (std::size_t r = 0; r < kRows; ++r) {
          CHECK_EQ(listed[j * kRows + r], all[static_cast<std::size_t>(list[j]) * kRows + r]);
        }
      }
      for (std::int64_t t = 0; t < kTokens; ++t) {
        for (const std::int64_t r0 : {0, 1, 30, 42}) {
          const std::int64_t r1 = std::min<std::int64_t>(kRows, r0 + 11);
          std::vector<float> y(11);
          kernels->format(format).dot(w.matrix, r0, r1, x.view, {nullptr, t, 1}, y.data(), 11);
          for (std::int64_t r = r0; r < r1; ++r) {
            CHECK_EQ(y[static_cast<std::size_t>(r - r0)], all[static_cast<std::size_t>(t * kRows + r)]);
          }
        }
      }
    }
  }
}

TEST(quantized_dots_are_the_same_bits_on_every_instruction_set) {
  const std::vector<const KernelSet*> sets = weights::kernel_sets();
  for (const Format format : weights::kEveryQuantized) {
    for (const auto& [tokens, blocks] : {std::pair<std::int64_t, std::int64_t>{1, 70}, {7, 70}, {1, 72}, {7, 72}}) {   // 72: whole steps of four blocks
      const std::int64_t cols = weights::columns(format, 32 * blocks);
      const Weights w = random_weights(format, 29, cols, 30, true, 0, 30);
      const std::vector<float> x = random_floats(tokens * cols, 31);
      const std::vector<float> first = dot(*sets[0], w, Prepared(*sets[0], x, cols), {nullptr, 0, tokens});
      for (const KernelSet* kernels : sets) {
        const std::vector<float> y = dot(*kernels, w, Prepared(*kernels, x, cols), {nullptr, 0, tokens});
        CHECK(std::memcmp(y.data(), first.data(), y.size() * sizeof(float)) == 0);
      }
    }
  }
}

TEST(rows_of_whole_wide_steps_give_the_right_values) {
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kEveryQuantized) {
      for (const std::int64_t tokens : {1, 5}) {
        check_dot(*kernels, random_weights(format, 11, weights::columns(format, 256), 40), 41, tokens);
      }
    }
  }
}

TEST(a_format_without_kernels_is_named) {
  ft::KernelSet none{};
  none.isa = "none";
  CHECK_THROWS(none.format(Format::Q4_0), std::invalid_argument,
               "no kernels for the weight format Q4_0 on the instruction set none");
}

TEST(an_unknown_instruction_set_is_named_with_the_ones_there_are) {
  CHECK_THROWS(ft::select_kernels("mmx"), std::invalid_argument, "'mmx' on this host; it has: scalar");
  CHECK_EQ(std::string(ft::select_kernels("scalar").isa), "scalar");
  CHECK_EQ(std::string(ft::select_kernels(nullptr).isa), ft::host_isas().back());
}

FT_TEST_MAIN
