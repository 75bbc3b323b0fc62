// What is particular to 4-bit and 8-bit floats: every scale and code byte, NaN among them, the FP8 rounding of
// DS_FP4's activations; and the exact dot products of all quantised formats.
#include <cfloat>
#include <limits>

#include "check.h"
#include "weights.h"

using ft::Format;
using ft::KernelSet;
using ft::Precision;
using weights::random_floats;
using weights::random_weights;
using weights::Weights;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr Format kFp4[] = {Format::MXFP4, Format::MXFP4_PAIRS, Format::NVFP4, Format::NVFP4_PAIRS,
                           Format::DS_FP4};

// x[T, cols] in the form that the format's kernel reads.
struct Prepared {
  std::vector<float> given, f32, d;
  std::vector<std::int8_t> q;
  std::vector<std::int32_t> sum;
  std::vector<std::uint8_t> raised;
  ft::Activations view;

  Prepared(const ft::FormatKernels& format, std::vector<float> x, std::int64_t cols)
      : given(std::move(x)), f32(given), d(given.size() / 32 + 1), q(given.size()), sum(given.size() / 16 + 1) {
    for (std::size_t at = 0; format.prepare != nullptr && at < given.size(); at += static_cast<std::size_t>(cols)) {
      format.prepare(given.data() + at, cols,
                     {f32.data() + at, q.data() + at, d.data() + at / 32, sum.data() + at / 16});
    }
    for (const std::int8_t x8 : q) raised.push_back(static_cast<std::uint8_t>(x8 + 128));
    view = {cols, f32.data(), q.data(), d.data(), sum.data(), raised.data()};
  }
};

std::vector<float> dot(const KernelSet& kernels, const Weights& w, const std::vector<float>& x) {
  const std::int64_t tokens = static_cast<std::int64_t>(x.size()) / w.matrix.cols;
  const ft::FormatKernels& format = kernels.format(w.matrix.format);
  const Prepared prepared(format, x, w.matrix.cols);
  std::vector<float> y(static_cast<std::size_t>(w.matrix.rows * tokens));
  format.dot(w.matrix, 0, w.matrix.rows, prepared.view, {nullptr, 0, tokens}, y.data(), w.matrix.rows);
  return y;
}

std::uint8_t* scale_of(Weights& w, std::int64_t row, std::int64_t block) {
  return const_cast<std::uint8_t*>(w.matrix.scales) + row * w.matrix.scale_row_stride +
         block * w.matrix.scale_block_stride;
}

// y, or NaN where that is wanted, or infinity (but for rounding) where the value does not fit.
void check_value(float y, double want, double relative) {
  if (std::isnan(want)) CHECK(std::isnan(y));
  else if (std::abs(want) > FLT_MAX) CHECK(std::copysign(1.0, want) * y > FLT_MAX * (1 - relative));
  else CHECK_NEAR(y, want, relative * std::abs(want) + std::ldexp(1, -149));
}

}  // namespace

// Row r has the scale byte r everywhere, and x picks out single columns: each is 127 * 2^-7, an int8 block of
// which only one number is not zero, and exact in FP8.
TEST(every_scale_byte_has_its_value_and_nan_is_kept) {
  for (const Precision precision : {Precision::Int8, Precision::Exact}) {
    for (const KernelSet* kernels : weights::kernel_sets(precision)) {
      for (const Format format : kFp4) {
        const std::int64_t cols = 128;
        Weights w = random_weights(format, 256, cols, 3);
        const ft::FormatInfo& info = ft::format_info(format);
        for (std::int64_t r = 0; r < 256; ++r) {
          for (std::int64_t b = 0; b < cols / info.block_elements; ++b) {
            std::memset(scale_of(w, r, b), static_cast<int>(r), static_cast<std::size_t>(info.scales_bytes));
          }
        }
        std::vector<float> row(static_cast<std::size_t>(cols));
        for (const std::int64_t tokens : {1, 5}) {
          for (const std::int64_t c : {0, 1, 17, 47, 94, 127}) {
            std::vector<float> x(static_cast<std::size_t>(cols * tokens), 0.0f);
            for (std::int64_t t = 0; t < tokens; ++t) x[static_cast<std::size_t>(t * cols + c)] = 1.0f;
            const std::vector<float> y = dot(*kernels, w, x);
            for (std::int64_t r = 0; r < 256; ++r) {
              const double want = w.at(r, c);
              // As float32 the largest codes are infinite then, and infinity times zero is NaN.
              if (precision == Precision::Exact && weights::has_e8m0(format) && r > 251 && r < 255) continue;
              for (std::int64_t t = 0; t < tokens; ++t) {
                check_value(y[static_cast<std::size_t>(t * 256 + r)], want, 4 * FLT_EPSILON);
              }
            }
          }
        }
        for (std::int64_t r = 0; r < 256; ++r) {
          kernels->format(format).dequantize_row(w.matrix, r, row.data());
          for (std::int64_t c = 0; c < cols; ++c) check_value(row[static_cast<std::size_t>(c)], w.at(r, c), 0);
        }
      }
    }
  }
}

TEST(a_nan_scale_poisons_its_row_alone) {
  for (const Precision precision : {Precision::Int8, Precision::Exact}) {
    for (const KernelSet* kernels : weights::kernel_sets(precision)) {
      for (const Format format : kFp4) {
        Weights w = random_weights(format, 19, 192, 4);
        const std::vector<float> x = random_floats(5 * 192, 5);
        const std::vector<float> clean = dot(*kernels, w, x);
        std::memset(w.codes.data(), 0, 1);
        scale_of(w, 13, 1)[0] = weights::has_e8m0(format) ? 255 : 0xff;
        const std::vector<float> y = dot(*kernels, w, x);
        for (std::size_t i = 0; i < y.size(); ++i) {
          if (i % 19 == 13) CHECK(std::isnan(y[i]));
          else if (i % 19 != 0) CHECK_EQ(y[i], clean[i]);
        }
      }
    }
  }
}

TEST(every_code_of_fp8_has_its_value_and_nan_is_kept) {
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const std::int64_t cols : {1, 15, 16, 100, 128, 300}) {
      Weights w = random_weights(Format::FP8_128, 256, cols, 6);
      for (const std::int64_t c : {std::int64_t{0}, cols / 2, cols - 1}) {
        for (std::int64_t r = 0; r < 256; ++r) {   // the other columns stay as they are, and meet zeros
          w.codes[static_cast<std::size_t>(r * w.matrix.code_row_stride + c)] = static_cast<std::uint8_t>(r);
        }
        for (const std::int64_t tokens : {1, 5}) {
          std::vector<float> x(static_cast<std::size_t>(cols * tokens), 0.0f);
          for (std::int64_t t = 0; t < tokens; ++t) x[static_cast<std::size_t>(t * cols + c)] = 3.0f;
          const std::vector<float> y = dot(*kernels, w, x);
          for (std::size_t i = 0; i < y.size(); ++i) {
            const auto r = static_cast<std::int64_t>(i % 256);
            check_value(y[i], 3 * w.at(r, c), 2 * FLT_EPSILON);
          }
        }
        std::vector<float> row(static_cast<std::size_t>(cols));
        for (std::int64_t r = 0; r < 256; ++r) {
          kernels->format(Format::FP8_128).dequantize_row(w.matrix, r, row.data());
          check_value(row[static_cast<std::size_t>(c)], w.at(r, c), FLT_EPSILON);
          auto& code = w.codes[static_cast<std::size_t>(r * w.matrix.code_row_stride + c)];
          code = static_cast<std::uint8_t>((code & 0x7f) == 0x7f ? 0 : code);
        }
      }
    }
  }
}

TEST(fp8_scales_change_every_128_rows_and_columns) {
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const std::int64_t cols : {64, 128, 129, 576}) {
      const Weights w = random_weights(Format::FP8_128, 300, cols, 7);
      for (const std::int64_t tokens : {1, 6}) {
        const std::vector<float> x = random_floats(tokens * cols, 8);
        const std::vector<float> y = dot(*kernels, w, x);
        for (std::int64_t t = 0; t < tokens; ++t) {
          for (std::int64_t r = 0; r < 300; ++r) {
            double want = 0, size = 0;
            for (std::int64_t c = 0; c < cols; ++c) {
              const double term = w.at(r, c) * x[static_cast<std::size_t>(t * cols + c)];
              want += term;
              size += std::abs(term);
            }
            // Terms of one column of lanes are added one by one, then lanes; two products are rounded.
            const double tolerance = static_cast<double>(cols + 6) * FLT_EPSILON / 2 * size;
            CHECK_NEAR(y[static_cast<std::size_t>(t * 300 + r)], want, tolerance);
          }
        }
      }
    }
  }
}

TEST(activations_of_ds_fp4_make_the_fp8_round_trip) {
  std::vector<float> x = random_floats(128 * 12 + 96, 9);
  for (std::size_t i = 0; i < 128; ++i) x[i] = 0.0f;
  for (std::size_t i = 128; i < 256; ++i) x[i] *= 1e-6f;    // below the least maximum
  for (std::size_t i = 256; i < 384; ++i) x[i] *= 1e30f;
  for (std::size_t i = 384; i < 512; ++i) x[i] = std::exp2(static_cast<float>(384) - static_cast<float>(i));
  for (std::size_t i = 512; i < 640; ++i) x[i] = static_cast<float>(i) - 512.0f - 64.0f;   // ties
  for (std::size_t i = 640; i < 768; ++i) x[i] = 1.0f;
  x[640] = 448.0f;                                // s = 1 exactly
  for (std::size_t i = 768; i < 896; ++i) x[i] = 0.3f;
  x[768] = std::nextafter(448.0f, 500.0f);        // s = 2
  for (std::size_t i = 896; i < 1024; ++i) x[i] = -440.0f + static_cast<float>(i % 7);
  const std::vector<float> want = weights::fp8_rounded(x, x.size());
  const auto cols = static_cast<std::int64_t>(x.size());
  for (const KernelSet* kernels : weights::kernel_sets(Precision::Exact)) {
    const Prepared got(kernels->format(Format::DS_FP4), x, cols);
    for (std::size_t i = 0; i < x.size(); ++i) CHECK_EQ(got.f32[i], want[i]);
  }
  const weights::Int8 int8 = weights::to_int8(want);
  for (const KernelSet* kernels : weights::kernel_sets()) {
    CHECK_EQ(kernels->format(Format::DS_FP4).activation_block, 128);
    const Prepared got(kernels->format(Format::DS_FP4), x, cols);
    CHECK(got.q == int8.q);
    for (std::size_t b = 0; b < int8.d.size(); ++b) CHECK_EQ(got.d[b], int8.d[b]);
    for (std::size_t b = 0; b < int8.sum.size(); ++b) CHECK_EQ(got.sum[b], int8.sum[b]);
  }
}

TEST(exact_dots_match_the_reference) {
  for (const KernelSet* kernels : weights::kernel_sets(Precision::Exact)) {
    for (const Format format : weights::kEvery) {
      CHECK(!kernels->format(format).int8_activations);
      unsigned seed = 40;
      for (const std::int64_t rows : {1, 3, 4, 9}) {
        for (const std::int64_t n : {1, 3, 17, 33}) {   // 17 and 33: several stretches
          const std::int64_t cols = weights::columns(format, n * 32);
          Weights w = random_weights(format, rows, cols, ++seed, rows == 9);
          w.matrix.factor = 0.75f;
          for (const std::int64_t tokens : {1, 6, 67}) {
            const std::vector<float> x = random_floats(tokens * cols, seed);
            const std::vector<float> y = dot(*kernels, w, x);
            const std::vector<float> read =
                format == Format::DS_FP4 ? weights::fp8_rounded(x, static_cast<std::size_t>(cols)) : x;
            for (std::int64_t t = 0; t < tokens; t += 5) {
              for (std::int64_t r = 0; r < rows; ++r) {
                double want = 0, size = 0;
                for (std::int64_t c = 0; c < cols; ++c) {
                  const double xi = read[static_cast<std::size_t>(t * cols + c)];
                  want += 0.75 * w.at(r, c) * xi;
                  size += 0.75 * (std::abs(w.at(r, c)) + 2 * std::abs(w.minimum(r, c))) * std::abs(xi);
                }
                const double tolerance = static_cast<double>(cols + 8) * FLT_EPSILON / 2 * size;
                CHECK_NEAR(y[static_cast<std::size_t>(t * rows + r)], want, tolerance);
              }
            }
          }
        }
      }
    }
  }
}

TEST(exact_dots_do_not_depend_on_the_batch_or_the_rows_beside_it) {
  for (const KernelSet* kernels : weights::kernel_sets(Precision::Exact)) {
    for (const Format format : weights::kEvery) {
      constexpr std::int64_t kRows = 11, kTokens = 70;
      const std::int64_t cols = weights::columns(format, 32 * 19);
      const Weights w = random_weights(format, kRows, cols, 50);
      const ft::FormatKernels& kernel = kernels->format(format);
      const std::vector<float> x = random_floats(kTokens * cols, 51);
      const std::vector<float> all = dot(*kernels, w, x);
      const Prepared prepared(kernel, x, cols);
      const std::int32_t list[] = {69, 3, 3, 0, 64};
      for (const std::int64_t r0 : {0, 1, 6, 10}) {
        const std::int64_t rows = std::min<std::int64_t>(5, kRows - r0);
        std::vector<float> y(25);
        kernel.dot(w.matrix, r0, r0 + rows, prepared.view, {list, 0, 5}, y.data(), 5);
        for (std::size_t j = 0; j < 5; ++j) {
          for (std::int64_t r = 0; r < rows; ++r) {
            CHECK_EQ(y[j * 5 + static_cast<std::size_t>(r)],
                     all[static_cast<std::size_t>(list[j] * kRows + r0 + r)]);
          }
        }
      }
    }
  }
}

TEST(a_token_that_is_not_finite_poisons_its_own_exact_outputs_only) {
  for (const KernelSet* kernels : weights::kernel_sets(Precision::Exact)) {
    for (const Format format : weights::kEvery) {
      const std::int64_t cols = weights::columns(format, 96);
      const Weights w = random_weights(format, 5, cols, 60);
      std::vector<float> x = random_floats(3 * cols, 61);
      const std::vector<float> clean = dot(*kernels, w, x);
      for (const float bad : {std::nanf(""), kInf, -kInf}) {
        x[static_cast<std::size_t>(cols) + 50] = bad;
        const std::vector<float> y = dot(*kernels, w, x);
        for (std::size_t i = 0; i < y.size(); ++i) {
          if (i / 5 == 1) CHECK(!std::isfinite(y[i]));
          else CHECK_EQ(y[i], clean[i]);
        }
      }
    }
  }
}

TEST(factors_multiply_the_product) {
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const Format format : weights::kEvery) {
      const std::int64_t cols = weights::columns(format, 32 * 66);   // several panels
      Weights w = random_weights(format, 9, cols, 70);
      for (const std::int64_t tokens : {1, 5}) {
        const std::vector<float> x = random_floats(tokens * cols, 71);
        w.matrix.factor = 1.0f;
        const std::vector<float> plain = dot(*kernels, w, x);
        w.matrix.factor = 0.3f;
        const std::vector<float> y = dot(*kernels, w, x);
        for (std::size_t i = 0; i < y.size(); ++i) CHECK_EQ(y[i], plain[i] * 0.3f);
      }
      std::vector<float> row(static_cast<std::size_t>(cols));
      kernels->format(format).dequantize_row(w.matrix, 4, row.data());
      for (std::int64_t c = 0; c < cols; ++c) {
        const double want = w.at(4, c) * static_cast<double>(0.3f);
        const double tolerance = 2 * FLT_EPSILON * (std::abs(want) + std::abs(w.minimum(4, c)));
        CHECK_NEAR(row[static_cast<std::size_t>(c)], want, tolerance);
      }
    }
  }
}

FT_TEST_MAIN
