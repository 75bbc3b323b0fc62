#include "bindings/weights.h"

#include <algorithm>
#include <utility>

#include <nanobind/stl/optional.h>

namespace ft::py {
namespace {

std::string number(std::int64_t value) { return std::to_string(value); }

void check_columns(Format format, std::int64_t rows, std::int64_t cols) {
  const FormatInfo& info = format_info(format);
  if (rows > 0 && cols > 0 && cols % info.block_elements == 0) return;
  throw nb::value_error(("rows, cols: found " + number(rows) + " x " + number(cols) +
                         ", expected positive numbers and whole blocks of " + number(info.block_elements) +
                         " columns for " + info.name)
                            .c_str());
}

std::vector<std::uint64_t> addresses(const char* name, Array array, bool used) {
  const View<const std::uint64_t, 1> view(name, array);
  if (used && std::find(view.data(), view.data() + view.size(), 0) != view.data() + view.size()) {
    view.refuse("a null address", "the address of each expert");
  }
  return {view.data(), view.data() + view.size()};
}

std::vector<std::uint64_t> addresses_for(const char* name, Array array, std::size_t experts) {
  std::vector<std::uint64_t> found = addresses(name, array, true);
  if (found.size() == experts) return found;
  throw nb::value_error((std::string(name) + ": found " + number(static_cast<std::int64_t>(found.size())) +
                         " addresses, expected one for each of " +
                         number(static_cast<std::int64_t>(experts)) + " experts")
                            .c_str());
}

ExpertPart make_part(Format format, std::int64_t rows, std::int64_t cols, Array codes, Array scales,
                     std::int64_t code_row_stride_bytes, std::int64_t code_block_stride_bytes,
                     std::int64_t scale_row_stride_bytes, std::int64_t scale_block_stride_bytes,
                     std::optional<Array> factors, std::optional<Array> biases) {
  check_columns(format, rows, cols);
  ExpertPart part{
      .format = format,
      .rows = rows,
      .cols = cols,
      .codes = addresses("codes", codes, true),
      .scales = addresses("scales", scales, format_info(format).scales_bytes > 0),
      .code_row_stride = code_row_stride_bytes,
      .code_block_stride = code_block_stride_bytes,
      .scale_row_stride = scale_row_stride_bytes,
      .scale_block_stride = scale_block_stride_bytes,
  };
  if (factors) part.factors = addresses_for("factors", *factors, part.codes.size());
  if (biases) part.biases = addresses_for("biases", *biases, part.codes.size());
  if (part.codes.empty() || part.codes.size() != part.scales.size()) {
    throw nb::value_error(("codes, scales: found " + number(static_cast<std::int64_t>(part.codes.size())) +
                           " and " + number(static_cast<std::int64_t>(part.scales.size())) +
                           " addresses, expected one of each per expert")
                              .c_str());
  }
  return part;
}

void expect_part(const char* name, const ExpertPart& part, std::int64_t rows, std::int64_t cols,
                 std::size_t experts) {
  if (part.rows == rows && part.cols == cols && part.codes.size() == experts) return;
  throw nb::value_error((std::string(name) + ": found " + number(static_cast<std::int64_t>(part.codes.size())) +
                         " experts of " + number(part.rows) + " x " + number(part.cols) + ", expected " +
                         number(static_cast<std::int64_t>(experts)) + " of " + number(rows) + " x " +
                         number(cols) + " to agree with gate")
                            .c_str());
}

}  // namespace

Matrix::Matrix(Format format, Array data, std::int64_t rows, std::int64_t cols, std::optional<Array> scales,
               float factor)
    : owner(nb::borrow(data.object)) {
  check_columns(format, rows, cols);
  const View<const std::uint8_t, 1> bytes("data", data);
  const FormatInfo& info = format_info(format);
  const std::int64_t blocks = rows * (cols / info.block_elements);
  const bool apart = info.scale_rows > 0;
  if (scales.has_value() != apart) {
    throw nb::value_error((std::string("scales: found ") + (apart ? "none" : "some") + ", expected " +
                           (apart ? "an array: " : "none: ") + info.name + " has its scales " +
                           (apart ? "apart" : "in its blocks"))
                              .c_str());
  }
  if (apart) {
    const View<const std::uint8_t, 1> scale_bytes("scales", *scales);
    scales_owner = nb::borrow(scales->object);
    bytes.expect({blocks * info.codes_bytes});
    packed = planes(format, bytes.data(), scale_bytes.data(), rows, cols);
    scale_bytes.expect({(rows + info.scale_rows - 1) / info.scale_rows * packed.scale_row_stride});
  } else {
    bytes.expect({blocks * info.block_bytes});
    packed = interleaved(format, bytes.data(), rows, cols);
  }
  packed.factor = factor;
}

Bank::Bank(const ExpertPart& gate, const ExpertPart& up, const ExpertPart& down, Activation activation,
           nb::object owner, float alpha, float limit)
    : bank{gate, up, down, {activation, alpha, limit}}, owner(std::move(owner)) {
  expect_part("up", up, gate.rows, gate.cols, gate.codes.size());
  expect_part("down", down, gate.cols, gate.rows, gate.codes.size());
}

void bind_weights(nb::module_& module) {
  nb::enum_<Format> formats(module, "Format", "A weight format that has native kernels.");
  for (int i = 0; i < kFormatCount; ++i) {
    formats.value(format_info(static_cast<Format>(i)).name, static_cast<Format>(i));
  }
  nb::enum_<Activation>(module, "Activation", "What stands between gate and up of an expert.")
      .value("SiLU", Activation::SiLU)
      .value("GELU", Activation::GELU)
      .value("GELUTanh", Activation::GELUTanh)
      .value("ClampedSwiGLU", Activation::ClampedSwiGLU)
      .value("ReLUSquared", Activation::ReLUSquared);

  nb::class_<Matrix>(module, "Matrix", "A weight matrix [rows, cols] over packed bytes, kept alive.")
      .def(nb::init<Format, Array, std::int64_t, std::int64_t, std::optional<Array>, float>(),
           nb::arg("format"), nb::arg("data"), nb::arg("rows"), nb::arg("cols"),
           nb::arg("scales") = nb::none(), nb::arg("factor") = 1.0f,
           "data: uint8 [n], exactly the bytes of the rows. scales: uint8 [n] of a format whose scales lie "
           "apart. factor multiplies the whole matrix.")
      .def_prop_ro("rows", [](const Matrix& m) { return m.packed.rows; })
      .def_prop_ro("cols", [](const Matrix& m) { return m.packed.cols; })
      .def_prop_ro("format", [](const Matrix& m) { return m.packed.format; });

  nb::class_<ExpertPart>(module, "ExpertPart", "Gate, up or down of every expert, as addresses.")
      .def(nb::new_(&make_part), nb::arg("format"), nb::arg("rows"), nb::arg("cols"), nb::arg("codes"),
           nb::arg("scales"), nb::arg("code_row_stride_bytes"), nb::arg("code_block_stride_bytes"),
           nb::arg("scale_row_stride_bytes"), nb::arg("scale_block_stride_bytes"),
           nb::arg("factors") = nb::none(), nb::arg("biases") = nb::none(),
           "codes, scales: uint64 [E], where each expert's codes and scales begin. factors: uint64 [E], "
           "where each expert's float32 factor lies; None: all are one. biases: uint64 [E], where each "
           "expert's bias, float32 [rows], begins; None: there is none. The caller vouches for the memory "
           "behind them.")
      .def_ro("rows", &ExpertPart::rows)
      .def_ro("cols", &ExpertPart::cols);

  nb::class_<Bank>(module, "ExpertBank", "The experts of one layer: gate and up [I, H], down [H, I].")
      .def(nb::init<const ExpertPart&, const ExpertPart&, const ExpertPart&, Activation, nb::object, float, float>(),
           nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("activation"),
           nb::arg("owner").none(),
           nb::arg("alpha") = GatedActivation{}.alpha, nb::arg("limit") = GatedActivation{}.limit,
           "alpha, limit: of ClampedSwiGLU. owner: whatever keeps the memory behind the addresses alive.")
      .def_prop_ro("experts", &Bank::experts)
      .def_prop_ro("hidden", &Bank::hidden);
}

}  // namespace ft::py
