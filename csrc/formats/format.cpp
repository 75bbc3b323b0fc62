#include "formats/format.h"

#include <stdexcept>

namespace ft {

namespace {

// One line per format, in the order of the enum.
constexpr FormatInfo kFormats[kFormatCount] = {
    //      block      codes      scales
    {"F32", 1, 4, 0, 4, 0, 0},
    {"F16", 1, 2, 0, 2, 0, 0},
    {"BF16", 1, 2, 0, 2, 0, 0},
    {"Q8_0", 32, 34, 2, 32, 0, 2},
    {"Q4_0", 32, 18, 2, 16, 0, 2},
    {"Q4_1", 32, 20, 4, 16, 0, 4},
    {"Q4_K", 256, 144, 16, 128, 0, 16},
    {"Q5_K", 256, 176, 16, 160, 0, 16},
    {"Q6_K", 256, 210, 0, 192, 192, 18},
    {"MXFP4", 32, 17, 1, 16, 0, 1},
    {"MXFP4_PAIRS", 32, 17, 0, 16, 16, 1, 1, 32},
    {"NVFP4", 64, 36, 4, 32, 0, 4},
    {"NVFP4_PAIRS", 16, 9, 0, 8, 8, 1, 1, 16},
    {"DS_FP4", 32, 17, 0, 16, 16, 1, 1, 32},
    {"FP8_128", 1, 1, 0, 1, 0, 4, 128, 128},
};

}  // namespace

const FormatInfo& format_info(Format format) { return kFormats[static_cast<int>(format)]; }

PackedMatrix interleaved(Format format, const std::uint8_t* data, std::int64_t rows, std::int64_t cols) {
  if (format == Format::FP8_128) {
    throw std::invalid_argument("FP8_128 has its scales in a matrix of their own: give codes and scales");
  }
  const FormatInfo& info = format_info(format);
  const std::int64_t row_bytes = cols / info.block_elements * info.block_bytes;
  return {
      .format = format,
      .rows = rows,
      .cols = cols,
      .codes = data + info.codes_offset,
      .scales = data + info.scales_offset,
      .code_row_stride = row_bytes,
      .code_block_stride = info.block_bytes,
      .scale_row_stride = row_bytes,
      .scale_block_stride = info.block_bytes,
  };
}

PackedMatrix planes(Format format, const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t rows,
                    std::int64_t cols) {
  const FormatInfo& info = format_info(format);
  const std::int64_t blocks = cols / info.block_elements;
  const std::int64_t row_scales = info.scale_cols > 0 ? (cols + info.scale_cols - 1) / info.scale_cols : blocks;
  return {
      .format = format,
      .rows = rows,
      .cols = cols,
      .codes = codes,
      .scales = scales,
      .code_row_stride = blocks * info.codes_bytes,
      .code_block_stride = info.codes_bytes,
      .scale_row_stride = row_scales * info.scales_bytes,
      .scale_block_stride = info.scales_bytes,
  };
}

}  // namespace ft
