// Room for the int8 form of rows of activations, and the view of it that kernels read.
#pragma once

#include <cstdint>
#include <memory>

#include "ops/kernel_set.h"

namespace ft {

class Int8Rows {
 public:
  Int8Rows() = default;
  // Uninitialised; cols is a multiple of 32.
  Int8Rows(std::int64_t rows, std::int64_t cols)
      : cols_(cols),
        q_(std::make_unique_for_overwrite<std::int8_t[]>(static_cast<std::size_t>(rows * cols))),
        d_(std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(rows * cols / 32))),
        sum_(std::make_unique_for_overwrite<std::int32_t[]>(static_cast<std::size_t>(rows * cols / 16))) {}

  // Columns [first, first + n) of a row, both multiples of 32. Blocks do not depend on each other.
  void quantize(const KernelSet& kernels, std::int64_t row, std::int64_t first, std::int64_t n,
                const float* x) {
    const std::int64_t at = row * cols_ + first;
    kernels.quantize_row(x, n, q_.get() + at, d_.get() + at / 32, sum_.get() + at / 16);
  }

  // With `f32` for the formats that read floats; it may be null.
  Activations view(std::int64_t cols, const float* f32) const {
    return {.cols = cols, .f32 = f32, .q = q_.get(), .d = d_.get(), .sum = sum_.get()};
  }

 private:
  std::int64_t cols_ = 0;
  std::unique_ptr<std::int8_t[]> q_;
  std::unique_ptr<float[]> d_;
  std::unique_ptr<std::int32_t[]> sum_;
};

}  // namespace ft
