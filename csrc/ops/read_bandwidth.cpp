#include "ops/read_bandwidth.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace ft {
namespace {

// Large enough that taking a piece costs nothing, small enough that the lanes finish together.
constexpr std::int64_t kPieceBytes = 256 * 1024;
constexpr std::int64_t kLineBytes = 64;
constexpr int kWords = 8;   // of a line, and as many independent sums
// The hardware prefetcher stops at every 4 KiB; asking this far ahead keeps the stream going.
constexpr std::int64_t kAheadBytes = 4096;

std::uint64_t sum_lines(const std::uint8_t* data, std::int64_t lines) {
  std::uint64_t sums[kWords] = {};
  for (std::int64_t i = 0; i < lines; ++i, data += kLineBytes) {
    __builtin_prefetch(data + kAheadBytes);
    std::uint64_t words[kWords];
    std::memcpy(words, data, kLineBytes);
    for (int j = 0; j < kWords; ++j) sums[j] += words[j];
  }
  std::uint64_t total = 0;
  for (const std::uint64_t sum : sums) total += sum;
  return total;
}

std::uint64_t sum_words(const std::uint8_t* data, std::int64_t bytes) {
  const std::int64_t lines = bytes / kLineBytes;
  std::uint64_t total = sum_lines(data, lines);
  for (std::int64_t at = lines * kLineBytes; at < bytes; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + at, static_cast<std::size_t>(std::min<std::int64_t>(8, bytes - at)));
    total += word;
  }
  return total;
}

class ReadTask final : public Task {
 public:
  ReadTask(const std::uint8_t* data, std::int64_t bytes) : data_(data), bytes_(bytes) {}

  void run(Lane&) override {
    std::uint64_t sum = 0;
    for (std::int64_t at; (at = next_piece_.take() * kPieceBytes) < bytes_;) {
      sum += sum_words(data_ + at, std::min(kPieceBytes, bytes_ - at));
    }
    total_.fetch_add(sum, std::memory_order_relaxed);
  }

  std::uint64_t total() const { return total_.load(std::memory_order_relaxed); }

 private:
  const std::uint8_t* data_;
  std::int64_t bytes_;
  TileCounter next_piece_;
  std::atomic<std::uint64_t> total_{0};
};

}  // namespace

std::uint64_t read_bytes(ThreadPool& pool, const std::uint8_t* data, std::int64_t bytes) {
  ReadTask task(data, bytes);
  pool.run(task);
  return task.total();
}

}  // namespace ft
