// Weight formats as data: the same facts that a kernel's block layout and a loader's checks need.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ft {

enum class Format : std::uint8_t { F32, F16, BF16, Q8_0, Q4_0, Q4_1 };
inline constexpr int kFormatCount = 6;

struct FormatInfo {
  const char* name;
  int block_elements;
  int block_bytes;
  int codes_offset;   // within an interleaved block
  int codes_bytes;
  int scales_offset;
  int scales_bytes;   // 0: plain floats
};

const FormatInfo& format_info(Format format);

// A matrix [rows, cols] of packed blocks. The checkpoint's interleaved bytes and a packed record's
// separate planes differ in the strides alone.
struct PackedMatrix {
  Format format;
  std::int64_t rows;
  std::int64_t cols;
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t code_row_stride;
  std::int64_t code_block_stride;
  std::int64_t scale_row_stride;
  std::int64_t scale_block_stride;
};

// The view of `data` as rows of interleaved blocks without padding.
PackedMatrix interleaved(Format format, const std::uint8_t* data, std::int64_t rows, std::int64_t cols);

}  // namespace ft
