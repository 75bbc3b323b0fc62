#include <algorithm>

#include "ops/int8_rows.h"
#include "ops/kernel_set.h"
#include "ops/ops.h"

namespace ft {
namespace {

// Small products stay on the caller: 2^17 multiplications take about as long as waking a parked lane.
constexpr std::int64_t kSerialProducts = std::int64_t{1} << 17;
// Rows of a tile: a multiple of every kernel's row group. Tokens of a tile: their int8 form stays in L2.
constexpr std::int64_t kTileRows = 32;
constexpr std::int64_t kTileTokens = 128;

constexpr std::int64_t tiles_of(std::int64_t n, std::int64_t tile) { return (n + tile - 1) / tile; }

class LinearTask final : public Task {
 public:
  LinearTask(const KernelSet& kernels, const PackedMatrix& w, const float* x, const float* bias, float* y,
             std::int64_t tokens)
      : kernels_(kernels),
        format_(kernels.format(w.format)),
        w_(w),
        x_(x),
        bias_(bias),
        y_(y),
        tokens_(tokens) {
    if (format_.int8_activations) int8_ = Int8Rows(tokens, w.cols);
  }

  void run(Lane& lane) override {
    if (format_.int8_activations) {
      for (std::int64_t t; (t = next_token_.take()) < tokens_;) quantize(t);
      lane.barrier();
    }
    const std::int64_t token_tiles = tiles_of(tokens_, kTileTokens);
    const std::int64_t tiles = tiles_of(w_.rows, kTileRows) * token_tiles;
    for (std::int64_t i; (i = next_tile_.take()) < tiles;) {
      multiply(i / token_tiles * kTileRows, kTileRows, i % token_tiles * kTileTokens, kTileTokens);
    }
  }

  void run_alone() {
    if (format_.int8_activations) {
      for (std::int64_t t = 0; t < tokens_; ++t) quantize(t);
    }
    multiply(0, w_.rows, 0, tokens_);
  }

 private:
  void quantize(std::int64_t t) { int8_.quantize(kernels_, t, 0, w_.cols, x_ + t * w_.cols); }

  void multiply(std::int64_t row, std::int64_t rows, std::int64_t token, std::int64_t tokens) const {
    const std::int64_t end = std::min(row + rows, w_.rows);
    const TokenRange range{nullptr, token, std::min(tokens, tokens_ - token)};
    float* y = y_ + token * w_.rows + row;
    format_.dot(w_, row, end, int8_.view(w_.cols, x_), range, y, w_.rows);
    if (bias_ == nullptr) return;
    for (std::int64_t j = 0; j < range.count; ++j) {
      for (std::int64_t r = row; r < end; ++r) y[j * w_.rows + (r - row)] += bias_[r];
    }
  }

  const KernelSet& kernels_;
  const FormatKernels& format_;
  const PackedMatrix& w_;
  const float* x_;
  const float* bias_;
  float* y_;
  std::int64_t tokens_;
  Int8Rows int8_;
  TileCounter next_token_, next_tile_;
};

}  // namespace

void linear(ThreadPool& pool, const KernelSet& kernels, const PackedMatrix& w, const float* x,
            const float* bias, float* y, std::int64_t tokens) {
  LinearTask task(kernels, w, x, bias, y, tokens);
  if (pool.size() == 1 || tokens * w.rows * w.cols < kSerialProducts) {
    task.run_alone();
  } else {
    pool.run(task);
  }
}

}  // namespace ft
