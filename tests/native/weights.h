// Random weight matrices in every format, with a plain double-precision reading of them that shares
// nothing with the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "core/cpu_features.h"
#include "formats/format.h"
#include "ops/kernel_set.h"

namespace weights {

// With blocks of up to 32 columns.
constexpr ft::Format kAll[] = {ft::Format::F32,         ft::Format::F16,         ft::Format::BF16,
                               ft::Format::Q8_0,        ft::Format::Q4_0,        ft::Format::Q4_1,
                               ft::Format::MXFP4,       ft::Format::MXFP4_PAIRS, ft::Format::NVFP4_PAIRS,
                               ft::Format::DS_FP4,      ft::Format::FP8_128};
constexpr ft::Format kQuantized[] = {ft::Format::Q8_0, ft::Format::Q4_0, ft::Format::Q4_1};

// With blocks of any size; see columns().
constexpr ft::Format kEvery[] = {ft::Format::F32,  ft::Format::F16,  ft::Format::BF16,
                                 ft::Format::Q8_0, ft::Format::Q4_0, ft::Format::Q4_1,
                                 ft::Format::Q4_K, ft::Format::Q5_K, ft::Format::Q6_K,
                                 ft::Format::MXFP4, ft::Format::MXFP4_PAIRS, ft::Format::NVFP4,
                                 ft::Format::NVFP4_PAIRS, ft::Format::DS_FP4, ft::Format::FP8_128};
constexpr ft::Format kEveryQuantized[] = {
    ft::Format::Q8_0,  ft::Format::Q4_0,        ft::Format::Q4_1,  ft::Format::Q4_K,
    ft::Format::Q5_K,  ft::Format::Q6_K,        ft::Format::MXFP4, ft::Format::MXFP4_PAIRS,
    ft::Format::NVFP4, ft::Format::NVFP4_PAIRS, ft::Format::DS_FP4};

// At least n columns: whole blocks of the format and of int8 activations.
inline std::int64_t columns(ft::Format format, std::int64_t n) {
  const std::int64_t unit = std::max(32, ft::format_info(format).block_elements);
  return (n + unit - 1) / unit * unit;
}

// Those that read int8 activations, unless they are to be exact.
inline bool quantized(ft::Format f) {
  return f != ft::Format::FP8_128 && ft::format_info(f).scales_bytes != 0;
}

// Those whose scales lie in a tensor of their own.
inline bool apart(ft::Format f) {
  return f == ft::Format::MXFP4_PAIRS || f == ft::Format::NVFP4_PAIRS || f == ft::Format::DS_FP4 ||
         f == ft::Format::FP8_128;
}
inline bool has_e8m0(ft::Format f) {
  return f == ft::Format::MXFP4 || f == ft::Format::MXFP4_PAIRS || f == ft::Format::DS_FP4;
}
inline bool has_e4m3(ft::Format f) { return f == ft::Format::NVFP4 || f == ft::Format::NVFP4_PAIRS; }

// Every instruction set that this host runs.
inline std::vector<const ft::KernelSet*> kernel_sets(ft::Precision precision = ft::Precision::Int8) {
  std::vector<const ft::KernelSet*> sets;
  for (const std::string& isa : ft::host_isas()) sets.push_back(&ft::select_kernels(isa.c_str(), precision));
  return sets;
}

inline double half(std::uint16_t h) {
  const int exponent = (h >> 10) & 31;
  const double mantissa = h & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

inline double e2m1(int nibble) {
  const int exponent = nibble >> 1 & 3, mantissa = nibble & 1;
  const double magnitude = exponent == 0 ? mantissa * 0.5 : std::ldexp(2 + mantissa, exponent - 2);
  return (nibble & 8) != 0 ? -magnitude : magnitude;
}

inline double e4m3(std::uint8_t b) {
  if ((b & 0x7f) == 0x7f) return std::nan("");
  const int exponent = b >> 3 & 15, mantissa = b & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (b & 0x80) != 0 ? -magnitude : magnitude;
}

inline double e8m0(std::uint8_t b) { return b == 255 ? std::nan("") : std::ldexp(1, b - 127); }

// A finite float16, its exponent field within [low, high].
inline std::uint16_t random_half(std::mt19937& rng, int low, int high) {
  const unsigned exponent = static_cast<unsigned>(low) + rng() % static_cast<unsigned>(high - low + 1);
  return static_cast<std::uint16_t>((rng() & 0x83ffu) | exponent << 10);
}

struct Weights {
  ft::PackedMatrix matrix;
  std::vector<std::uint8_t> codes, scales;   // the memory; `scales` only if in planes
  double at(std::int64_t row, std::int64_t col) const;
  // The part of at() that does not depend on the code: the minimum of formats that have one, else 0.
  double minimum(std::int64_t row, std::int64_t col) const;

  const std::uint8_t* block_scales(std::int64_t row, std::int64_t col) const {
    return matrix.scales + row * matrix.scale_row_stride +
           col / ft::format_info(matrix.format).block_elements * matrix.scale_block_stride;
  }
};

inline double half_at(const std::uint8_t* p) {
  std::uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return half(h);
}

// Numbers of 6 bits in the 12 bytes of Q4_K and Q5_K, as a string of bits: i of the 8 scales, 8 + i of the
// 8 minima. The lower four are bits of byte i or the nibbles of bytes 8..11.
inline int six_bits(const std::uint8_t* b, int i) {
  const int group = i / 8, j = i % 8;
  if (j < 4) return b[4 * group + j] % 64;
  const int nibble = group == 0 ? b[4 + j] % 16 : b[4 + j] / 16;
  return nibble + b[4 * group + j - 4] / 64 * 16;
}

inline double Weights::minimum(std::int64_t row, std::int64_t col) const {
  const std::uint8_t* s = block_scales(row, col);
  switch (matrix.format) {
    case ft::Format::Q4_1: return half_at(s + 2);
    case ft::Format::Q4_K:
    case ft::Format::Q5_K: return -half_at(s + 2) * six_bits(s + 4, 8 + static_cast<int>(col % 256 / 32));
    default: return 0;
  }
}

inline double Weights::at(std::int64_t row, std::int64_t col) const {
  const ft::FormatInfo& info = ft::format_info(matrix.format);
  const std::int64_t block = col / info.block_elements;
  const int i = static_cast<int>(col % info.block_elements);
  const std::uint8_t* c = matrix.codes + row * matrix.code_row_stride + block * matrix.code_block_stride;
  const std::uint8_t* s = matrix.scales + row * matrix.scale_row_stride + block * matrix.scale_block_stride;
  std::uint16_t u16[2] = {};
  const int field_bytes = quantized(matrix.format) ? info.scales_bytes : info.codes_bytes;
  std::memcpy(u16, quantized(matrix.format) ? s : c, static_cast<std::size_t>(std::min(field_bytes, 4)));
  const auto nibble = [&] { return i < 16 ? c[i] & 15 : c[i - 16] >> 4; };
  switch (matrix.format) {
    case ft::Format::F32: {
      float v;
      std::memcpy(&v, c, sizeof v);
      return v;
    }
    case ft::Format::F16: return half(u16[0]);
    case ft::Format::BF16: {
      const std::uint32_t bits = static_cast<std::uint32_t>(u16[0]) << 16;
      float v;
      std::memcpy(&v, &bits, sizeof v);
      return v;
    }
    case ft::Format::Q8_0: return static_cast<std::int8_t>(c[i]) * half(u16[0]);
    case ft::Format::Q4_0: return (nibble() - 8) * half(u16[0]);
    case ft::Format::Q4_1: return nibble() * half(u16[0]) + half(u16[1]);
    case ft::Format::Q4_K: {
      const int code = c[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
      return code * half(u16[0]) * six_bits(s + 4, i / 32) + minimum(row, col);
    }
    case ft::Format::Q5_K: {
      const int low = c[32 + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
      const int code = low + (c[i % 32] >> i / 32 & 1) * 16;
      return code * half(u16[0]) * six_bits(s + 4, i / 32) + minimum(row, col);
    }
    case ft::Format::Q6_K: {
      const int low = c[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
      const int high = c[128 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
      return (low + 16 * high - 32) * half_at(s + 16) * static_cast<std::int8_t>(s[i / 16]);
    }
    case ft::Format::MXFP4: return e2m1(nibble()) * e8m0(*s);
    case ft::Format::MXFP4_PAIRS:
    case ft::Format::DS_FP4: return e2m1(c[i / 2] >> i % 2 * 4 & 15) * e8m0(*s);
    case ft::Format::NVFP4: {
      const int code = c[i / 16 * 8 + i % 8] >> i % 16 / 8 * 4 & 15;
      return e2m1(code) * e4m3(s[i / 16]);
    }
    case ft::Format::NVFP4_PAIRS: return e2m1(c[i / 2] >> i % 2 * 4 & 15) * e4m3(*s);
    case ft::Format::FP8_128: {
      float scale;
      std::memcpy(&scale, matrix.scales + row / 128 * matrix.scale_row_stride +
                              col / 128 * matrix.scale_block_stride, sizeof scale);
      return e4m3(*c) * scale;
    }
  }
  return std::nan("");
}

inline void random_bytes(std::mt19937& rng, std::uint8_t* p, int n) {
  for (int i = 0; i < n; ++i) p[i] = static_cast<std::uint8_t>(rng());
}

inline Weights random_fp8(std::int64_t rows, std::int64_t cols, std::mt19937& rng) {
  Weights w;
  const std::int64_t code_row = cols + 16, scale_row = (cols + 127) / 128 * 4 + 6, scale_rows = (rows + 127) / 128;
  w.codes.resize(static_cast<std::size_t>((rows - 1) * code_row + cols));
  w.scales.resize(static_cast<std::size_t>((scale_rows - 1) * scale_row + (cols + 127) / 128 * 4));
  w.matrix = {ft::Format::FP8_128, rows, cols, w.codes.data(), w.scales.data(), code_row, 1, scale_row, 4};
  for (std::uint8_t& byte : w.codes) {
    byte = static_cast<std::uint8_t>(rng());
    if ((byte & 0x7f) == 0x7f) --byte;   // not NaN
  }
  for (std::int64_t r = 0; r < scale_rows; ++r) {
    for (std::int64_t b = 0; b < (cols + 127) / 128; ++b) {
      const float scale = std::uniform_real_distribution<float>(0.001f, 0.02f)(rng);
      std::memcpy(w.scales.data() + r * scale_row + b * 4, &scale, 4);
    }
  }
  return w;
}

// The scale bytes of a block of MXFP4 or NVFP4, for exponents of float16 in [low, high]. None is NaN.
inline void random_fp4_scales(ft::Format format, std::mt19937& rng, std::uint8_t* p, int low, int high) {
  const auto any = [&](int a, int b) { return a + static_cast<int>(rng() % static_cast<unsigned>(b - a + 1)); };
  for (int i = 0; i < ft::format_info(format).scales_bytes; ++i) {
    if (has_e8m0(format)) {
      p[i] = static_cast<std::uint8_t>(112 + any(low, high));
    } else {   // the exponents of e4m3 begin 8 above those of float16
      const int exponent = std::clamp(any(low, high) - 8, 0, 15);
      p[i] = static_cast<std::uint8_t>(any(0, 1) * 128 + exponent * 8 + any(0, exponent == 15 ? 6 : 7));
    }
  }
}

// Random codes (every one of them), and scales with exponent fields in [low, high] (0: subnormal, 30:
// up to 65504). In planes, the codes and the scales lie apart, and rows have a gap between them. The
// memory ends with the last byte of the matrix, so that a sanitizer sees what reads beyond.
inline Weights random_weights(ft::Format format, std::int64_t rows, std::int64_t cols, unsigned seed,
                              bool planes = false, int low = 8, int high = 12) {
  std::mt19937 rng(seed);
  const ft::FormatInfo& info = ft::format_info(format);
  const std::int64_t blocks = cols / info.block_elements;
  if (format == ft::Format::FP8_128) return random_fp8(rows, cols, rng);
  Weights w;
  if (apart(format) || (planes && quantized(format))) {
    const std::int64_t code_row = blocks * info.codes_bytes + 16;
    const std::int64_t scale_row = blocks * info.scales_bytes + 6;
    w.codes.resize(static_cast<std::size_t>((rows - 1) * code_row + blocks * info.codes_bytes));
    w.scales.resize(static_cast<std::size_t>((rows - 1) * scale_row + blocks * info.scales_bytes));
    w.matrix = {format, rows, cols, w.codes.data(), w.scales.data(), code_row, info.codes_bytes,
                scale_row, info.scales_bytes};
  } else {
    w.codes.resize(static_cast<std::size_t>(rows * blocks * info.block_bytes));
    w.matrix = ft::interleaved(format, w.codes.data(), rows, cols);
  }
  for (std::uint8_t& byte : w.codes) byte = static_cast<std::uint8_t>(rng());
  std::normal_distribution<float> normal;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t b = 0; b < blocks; ++b) {
      auto* code = const_cast<std::uint8_t*>(w.matrix.codes + r * w.matrix.code_row_stride +
                                             b * w.matrix.code_block_stride);
      auto* scale = const_cast<std::uint8_t*>(w.matrix.scales + r * w.matrix.scale_row_stride +
                                              b * w.matrix.scale_block_stride);
      const float v = normal(rng);
      std::uint32_t bits;
      std::memcpy(&bits, &v, sizeof bits);
      const std::uint16_t top = static_cast<std::uint16_t>(bits >> 16);
      const std::uint16_t f16[2] = {random_half(rng, low, high), random_half(rng, low, high)};
      if (format == ft::Format::F32) std::memcpy(code, &v, 4);
      else if (format == ft::Format::BF16) std::memcpy(code, &top, 2);
      else if (format == ft::Format::F16) std::memcpy(code, f16, 2);
      else if (has_e8m0(format) || has_e4m3(format)) random_fp4_scales(format, rng, scale, low, high);
      else if (format == ft::Format::Q6_K) random_bytes(rng, scale, 16), std::memcpy(scale + 16, f16, 2);
      else {
        random_bytes(rng, scale, info.scales_bytes);
        std::memcpy(scale, f16, static_cast<std::size_t>(std::min(info.scales_bytes, 4)));
      }
    }
  }
  return w;
}

inline std::vector<float> random_floats(std::int64_t n, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) x = normal(rng);
  return v;
}

// The int8 form of activations, by its definition: d = max|x| / 127, q = round(x / d).
struct Int8 {
  std::vector<std::int8_t> q;
  std::vector<float> d;
  std::vector<std::int32_t> sum;
};

inline Int8 to_int8(const std::vector<float>& x) {
  Int8 r;
  for (std::size_t b = 0; b + 32 <= x.size(); b += 32) {
    float largest = 0;
    for (std::size_t i = b; i < b + 32; ++i) largest = std::fmax(largest, std::fabs(x[i]));
    const float d = largest / 127.0f;
    for (std::size_t i = b; i < b + 32; ++i) {
      if (i % 16 == 0) r.sum.push_back(0);
      const float q = d > 0 ? std::fmin(std::fmax(std::nearbyint(x[i] / d), -127.0f), 127.0f) : 0.0f;
      r.q.push_back(static_cast<std::int8_t>(q));
      r.sum.back() += r.q.back();
    }
    r.d.push_back(d);
  }
  return r;
}

// DS_FP4's activations: FP8 per 128 columns, by a search of all e4m3 numbers for the nearest to x / s (of
// two as near, the one with an even code), and s the least power of two >= max(max|x|, 1e-4) / 448.
inline std::vector<float> fp8_rounded(const std::vector<float>& x, std::size_t cols) {
  std::vector<float> y;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t row = i / cols * cols, first = row + (i - row) / 128 * 128;
    double largest = 1e-4;
    for (std::size_t j = first; j < std::min(first + 128, row + cols); ++j) {
      largest = std::max<double>(largest, std::abs(x[j]));
    }
    const double s = std::exp2(std::ceil(std::log2(largest / 448)));
    int best = 0;
    for (int b = 1; b < 127; ++b) {
      const double now = std::abs(e4m3(static_cast<std::uint8_t>(b)) - std::abs(x[i]) / s);
      const double before = std::abs(e4m3(static_cast<std::uint8_t>(best)) - std::abs(x[i]) / s);
      if (now < before || (now == before && b % 2 == 0)) best = b;
    }
    y.push_back(static_cast<float>(std::copysign(e4m3(static_cast<std::uint8_t>(best)) * s, x[i])));
  }
  return y;
}

}  // namespace weights
