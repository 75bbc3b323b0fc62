#include <algorithm>
#include <span>

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
// So few tokens are rounded by the caller beforehand: it takes less time than a barrier.
constexpr std::int64_t kFewTokens = 4;

constexpr std::int64_t tiles_of(std::int64_t n, std::int64_t tile) { return (n + tile - 1) / tile; }

// Products of several matrices with the same tokens, which are rounded to int8 once for all of them.
class LinearTask final : public Task {
 public:
  LinearTask(const KernelSet& kernels, std::span<const LinearPart> parts, const float* x, std::int64_t tokens)
      : kernels_(kernels), parts_(parts), x_(x), cols_(parts.front().w->cols), tokens_(tokens) {
    for (const LinearPart& part : parts) rounds_ |= kernels.format(part.w->format).int8_activations;
    if (rounds_) int8_ = Int8Rows(tokens, cols_);
    if (tokens <= kFewTokens) quantize_all();
  }

  std::int64_t products() const {
    std::int64_t rows = 0;
    for (const LinearPart& part : parts_) rows += part.w->rows;
    return rows * cols_ * tokens_;
  }

  void run(Lane& lane) override {
    if (rounds_ && tokens_ > kFewTokens) {
      for (std::int64_t t; (t = next_token_.take()) < tokens_;) quantize(t);
      lane.barrier();
    }
    const std::int64_t token_tiles = tiles_of(tokens_, kTileTokens);
    std::int64_t tile = next_tile_.take(), first = 0;   // of the part at hand
    for (const LinearPart& part : parts_) {
      const std::int64_t tiles = tiles_of(part.w->rows, kTileRows) * token_tiles;
      for (; tile < first + tiles; tile = next_tile_.take()) {
        const std::int64_t i = tile - first;
        multiply(part, i / token_tiles * kTileRows, kTileRows, i % token_tiles * kTileTokens, kTileTokens);
      }
      first += tiles;
    }
  }

  void run_alone() {
    if (tokens_ > kFewTokens) quantize_all();
    for (const LinearPart& part : parts_) multiply(part, 0, part.w->rows, 0, tokens_);
  }

 private:
  void quantize_all() {
    if (!rounds_) return;
    for (std::int64_t t = 0; t < tokens_; ++t) quantize(t);
  }

  void quantize(std::int64_t t) { int8_.quantize(kernels_, t, 0, cols_, x_ + t * cols_); }

  void multiply(const LinearPart& part, std::int64_t row, std::int64_t rows, std::int64_t token,
                std::int64_t tokens) const {
    const std::int64_t all_rows = part.w->rows;
    const std::int64_t end = std::min(row + rows, all_rows);
    const TokenRange range{nullptr, token, std::min(tokens, tokens_ - token)};
    float* y = part.y + token * all_rows + row;
    kernels_.format(part.w->format).dot(*part.w, row, end, int8_.view(cols_, x_), range, y, all_rows);
    if (part.bias == nullptr) return;
    for (std::int64_t j = 0; j < range.count; ++j) {
      for (std::int64_t r = row; r < end; ++r) y[j * all_rows + (r - row)] += part.bias[r];
    }
  }

  const KernelSet& kernels_;
  const std::span<const LinearPart> parts_;
  const float* x_;
  const std::int64_t cols_, tokens_;
  bool rounds_ = false;
  Int8Rows int8_;
  TileCounter next_token_, next_tile_;
};

}  // namespace

void linear(ThreadPool& pool, const KernelSet& kernels, std::span<const LinearPart> parts, const float* x,
            std::int64_t tokens) {
  if (parts.empty()) return;
  LinearTask task(kernels, parts, x, tokens);
  if (pool.size() == 1 || task.products() < kSerialProducts) {
    task.run_alone();
  } else {
    pool.run(task);
  }
}

}  // namespace ft
