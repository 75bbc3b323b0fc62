// Weight formats as data: the same facts that a kernel's block layout and a loader's checks need.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ft {

// MXFP4 and NVFP4 are GGUF's blocks. _PAIRS are the layouts of safetensors: byte j holds the elements 2j
// (low nibble) and 2j + 1, and the scales lie in a tensor of their own. DS_FP4 is as MXFP4_PAIRS with
// activations rounded to FP8 first. FP8_128 is e4m3 with one float32 scale for 128 x 128 numbers.
enum class Format : std::uint8_t {
  F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, MXFP4, MXFP4_PAIRS, NVFP4, NVFP4_PAIRS, DS_FP4, FP8_128
};
inline constexpr int kFormatCount = 15;

// Of formats whose scales lie apart, the bytes of a block are said as if they followed its codes. The
// scales of FP8_128 belong to 128 columns and 128 rows; its codes are plain numbers.
struct FormatInfo {
  const char* name;
  int block_elements;
  int block_bytes;
  int codes_offset;   // within an interleaved block
  int codes_bytes;
  int scales_offset;
  int scales_bytes;   // 0: plain floats
  // Of formats whose scales lie apart: the rows and columns that share one. 0: they lie in the block.
  int scale_rows = 0;
  int scale_cols = 0;
};

const FormatInfo& format_info(Format format);

// A matrix [rows, cols] of packed blocks. The checkpoint's interleaved bytes and a packed record's
// separate planes differ in the strides alone. The product is multiplied by `factor`. FP8_128: scale (i, j)
// is at i * scale_row_stride + j * scale_block_stride, for row i * 128 and column j * 128 on.
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
  float factor = 1.0f;
  // Codes that will be read after the rows asked for, if known: their beginning is fetched meanwhile.
  const std::uint8_t* codes_after = nullptr;
};

// The view of `data` as rows of interleaved blocks without padding. FP8_128 has no such form
// (std::invalid_argument).
PackedMatrix interleaved(Format format, const std::uint8_t* data, std::int64_t rows, std::int64_t cols);
// The view of codes and scales in contiguous planes.
PackedMatrix planes(Format format, const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t rows,
                    std::int64_t cols);

}  // namespace ft
