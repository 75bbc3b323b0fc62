// Weights as Python objects that keep the bytes behind them alive.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>

#include "bindings/arrays.h"
#include "formats/format.h"
#include "ops/ops.h"

namespace ft::py {

struct Matrix {
  Matrix(Format format, Array data, std::int64_t rows, std::int64_t cols, std::optional<Array> scales, float factor);

  PackedMatrix packed;
  nb::object owner;
  nb::object scales_owner;
};

struct Bank {
  Bank(const ExpertPart& gate, const ExpertPart& up, const ExpertPart& down, Activation activation,
       nb::object owner, float alpha, float limit);

  std::int64_t experts() const { return static_cast<std::int64_t>(bank.gate.codes.size()); }
  std::int64_t hidden() const { return bank.gate.cols; }

  ExpertBank bank;
  nb::object owner;
};

void bind_weights(nb::module_& module);

}  // namespace ft::py
