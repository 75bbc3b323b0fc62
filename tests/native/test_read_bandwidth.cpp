#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "ops/read_bandwidth.h"

using namespace ft;

namespace {

std::uint64_t expected_sum(const std::uint8_t* data, std::int64_t bytes) {
  std::uint64_t total = 0;
  for (std::int64_t at = 0; at < bytes; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + at, static_cast<std::size_t>(std::min<std::int64_t>(8, bytes - at)));
    total += word;
  }
  return total;
}

}  // namespace

TEST(reads_every_byte_on_any_number_of_threads) {
  std::vector<std::uint8_t> data((std::size_t{1} << 20) + 77);
  std::mt19937 rng(1);
  for (auto& byte : data) byte = static_cast<std::uint8_t>(rng());
  for (const std::size_t threads : {1, 2, 3}) {
    ThreadPool pool(std::vector<int>(threads, -1));
    for (const std::int64_t bytes : {0, 1, 7, 8, 63, 64, 65, 262143, 262144, 262145, (1 << 20) + 77}) {
      CHECK(read_bytes(pool, data.data(), bytes) == expected_sum(data.data(), bytes));
    }
  }
}

TEST(starts_at_any_address) {
  std::vector<std::uint8_t> data(4096, 3);
  ThreadPool pool(std::vector<int>(2, -1));
  for (int shift = 0; shift < 9; ++shift) {
    CHECK(read_bytes(pool, data.data() + shift, 1001) == expected_sum(data.data() + shift, 1001));
  }
}

FT_TEST_MAIN
