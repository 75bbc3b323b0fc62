#include "formats/format.h"

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
};

}  // namespace

const FormatInfo& format_info(Format format) { return kFormats[static_cast<int>(format)]; }

PackedMatrix interleaved(Format format, const std::uint8_t* data, std::int64_t rows, std::int64_t cols) {
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

}  // namespace ft
