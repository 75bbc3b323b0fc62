// Room for rows of activations in the form that a format's dot product reads, and the view of them.
#pragma once

#include <cstdint>
#include <memory>

#include "ops/kernel_set.h"

namespace ft {

class PreparedRows {
 public:
  PreparedRows() = default;
  // Uninitialised; nothing at all for formats that read float32 as they are. cols is whole blocks of int8
  // activations if the format reads those.
  PreparedRows(const FormatKernels& format, std::int64_t rows, std::int64_t cols)
      : prepare_(format.prepare), cols_(cols) {
    const auto numbers = static_cast<std::size_t>(rows * cols);
    if (prepare_ == nullptr) return;
    if (!format.int8_activations) {
      f32_ = std::make_unique_for_overwrite<float[]>(numbers);
      return;
    }
    q_ = std::make_unique_for_overwrite<std::int8_t[]>(numbers);
    raised_ = std::make_unique_for_overwrite<std::uint8_t[]>(numbers);
    d_ = std::make_unique_for_overwrite<float[]>(numbers / 32);
    sum_ = std::make_unique_for_overwrite<std::int32_t[]>(numbers / 16);
  }

  // Columns [first, first + n) of a row. `first` is a multiple of the format's activation_block; blocks do
  // not depend on each other.
  void prepare(std::int64_t row, std::int64_t first, std::int64_t n, const float* x) {
    if (prepare_ == nullptr) return;
    const std::int64_t at = row * cols_ + first;
    if (f32_ != nullptr) {
      prepare_(x, n, {.f32 = f32_.get() + at, .q = nullptr, .d = nullptr, .sum = nullptr});
    } else {
      prepare_(x, n, {.f32 = nullptr, .q = q_.get() + at, .d = d_.get() + at / 32, .sum = sum_.get() + at / 16});
      for (std::int64_t i = at; i < at + n; ++i) raised_[i] = static_cast<std::uint8_t>(q_[i] ^ 0x80);
    }
  }

  // `x`: the rows themselves, for formats that read them as they are.
  Activations view(const float* x) const {
    return {.cols = cols_,
            .f32 = f32_ != nullptr ? f32_.get() : x,
            .q = q_.get(),
            .d = d_.get(),
            .sum = sum_.get(),
            .raised = raised_.get()};
  }

 private:
  void (*prepare_)(const float* x, std::int64_t cols, const ActivationRow& out) = nullptr;
  std::int64_t cols_ = 0;
  std::unique_ptr<float[]> f32_;
  std::unique_ptr<std::int8_t[]> q_;
  std::unique_ptr<std::uint8_t[]> raised_;
  std::unique_ptr<float[]> d_;
  std::unique_ptr<std::int32_t[]> sum_;
};

}  // namespace ft
