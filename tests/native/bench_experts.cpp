// One decode step of a MoE layer against a plain read of the same bytes, alternating in one process.
// Usage: bench_experts [format] [tokens] [repetitions] [isa]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <sys/mman.h>

#include "core/pool.h"
#include "core/topology.h"
#include "ops/kernel_set.h"
#include "ops/ops.h"

namespace {

constexpr std::int64_t kHidden = 2048, kInner = 768, kExperts = 64, kTopK = 8;
constexpr int kLayers = 3;   // visited in turn, so that no expert is still in a cache

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// Adds up 8-byte words of every part, in pieces of 64 KiB handed out to the lanes.
class ReadTask final : public ft::Task {
 public:
  explicit ReadTask(std::vector<std::pair<const std::uint8_t*, std::int64_t>> parts) {
    for (const auto& [data, bytes] : parts) {
      for (std::int64_t at = 0; at < bytes; at += kPiece) {
        pieces_.push_back({data + at, std::min(kPiece, bytes - at)});
      }
    }
  }
  void run(ft::Lane&) override {
    std::uint64_t total = 0;
    for (std::int64_t i; (i = next_.take()) < static_cast<std::int64_t>(pieces_.size());) {
      const auto& [data, bytes] = pieces_[static_cast<std::size_t>(i)];
      std::uint64_t sums[8] = {};
      for (std::int64_t at = 0; at + 64 <= bytes; at += 64) {
        __builtin_prefetch(data + at + 4096);
        std::uint64_t words[8];
        std::memcpy(words, data + at, 64);
        for (int j = 0; j < 8; ++j) sums[j] += words[j];
      }
      total += std::accumulate(sums, sums + 8, std::uint64_t{0});
    }
    sink_.fetch_add(total, std::memory_order_relaxed);
  }

 private:
  static constexpr std::int64_t kPiece = 64 * 1024;
  std::vector<std::pair<const std::uint8_t*, std::int64_t>> pieces_;
  ft::TileCounter next_;
  std::atomic<std::uint64_t> sink_{0};
};

ft::ExpertPart make_part(ft::Format format, std::int64_t rows, std::int64_t cols, const std::uint8_t* data) {
  const ft::PackedMatrix m = ft::interleaved(format, data, rows, cols);
  ft::ExpertPart part{format, rows, cols, {}, {}, m.code_row_stride, m.code_block_stride, m.scale_row_stride,
                      m.scale_block_stride};
  for (std::int64_t e = 0; e < kExperts; ++e) {
    part.codes.push_back(reinterpret_cast<std::uint64_t>(m.codes + e * rows * m.code_row_stride));
    part.scales.push_back(reinterpret_cast<std::uint64_t>(m.scales + e * rows * m.scale_row_stride));
  }
  return part;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "Q4_0";
  const std::int64_t tokens = argc > 2 ? std::atoll(argv[2]) : 1;
  const int repetitions = argc > 3 ? std::atoi(argv[3]) : 200;
  const ft::KernelSet& kernels = ft::select_kernels(argc > 4 ? argv[4] : nullptr);
  int index = 0;
  while (index < ft::kFormatCount && wanted != ft::format_info(static_cast<ft::Format>(index)).name) ++index;
  if (index == ft::kFormatCount) {
    std::fprintf(stderr, "no format '%s'\n", wanted.c_str());
    return 2;
  }
  const auto format = static_cast<ft::Format>(index);
  const ft::FormatInfo& info = ft::format_info(format);
  const std::int64_t part_bytes = kHidden * kInner / info.block_elements * info.block_bytes;
  const std::int64_t layer_bytes = 3 * kExperts * part_bytes;

  void* memory = mmap(nullptr, static_cast<std::size_t>(kLayers * layer_bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return std::perror("mmap"), 1;
  madvise(memory, static_cast<std::size_t>(kLayers * layer_bytes), MADV_HUGEPAGE);
  auto* data = static_cast<std::uint8_t*>(memory);
  std::mt19937_64 rng(1);
  for (std::int64_t i = 0; i < kLayers * layer_bytes; i += 8) {
    const std::uint64_t word = rng() & 0x9fff9fff9fff9fffu;   // no huge exponent in any format
    std::memcpy(data + i, &word, 8);
  }
  std::vector<ft::ExpertBank> banks;
  for (int l = 0; l < kLayers; ++l) {
    const std::uint8_t* at = data + l * layer_bytes;
    banks.push_back({make_part(format, kInner, kHidden, at),
                     make_part(format, kInner, kHidden, at + kExperts * part_bytes),
                     make_part(format, kHidden, kInner, at + 2 * kExperts * part_bytes),
                     ft::Activation::SiLU});
  }

  ft::ThreadPool pool(ft::physical_cpus(ft::allowed_cpus()));
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(tokens * kHidden));
  std::vector<double> y(x.size());
  for (float& v : x) v = normal(rng);
  std::vector<float> weights(static_cast<std::size_t>(tokens * kTopK), 0.125f);
  std::vector<std::int32_t> ids(weights.size()), order(kExperts);
  std::iota(order.begin(), order.end(), 0);

  std::vector<double> ours, reads;
  double bytes_sum = 0;
  for (int i = 0; i < repetitions; ++i) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::shuffle(order.begin(), order.end(), rng);
      std::copy_n(order.begin(), kTopK, ids.begin() + t * kTopK);
    }
    std::vector<std::int32_t> distinct = ids;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    const double bytes = 3.0 * static_cast<double>(part_bytes) * static_cast<double>(distinct.size());
    bytes_sum += bytes;
    const ft::ExpertBank& bank = banks[static_cast<std::size_t>(i % kLayers)];
    double start = seconds();
    pool.run(*ft::make_expert_task(
        kernels, {&bank, x.data(), ids.data(), weights.data(), y.data(), tokens, kTopK}, pool.size()));
    ours.push_back(bytes / (seconds() - start) * 1e-9);
    const ft::ExpertBank& other = banks[static_cast<std::size_t>((i + 1) % kLayers)];
    std::vector<std::pair<const std::uint8_t*, std::int64_t>> parts;
    for (const ft::ExpertPart* part : {&other.gate, &other.up, &other.down}) {
      for (const std::int32_t e : distinct) {
        const std::uint64_t address = part->codes[static_cast<std::size_t>(e)];
        parts.push_back({reinterpret_cast<const std::uint8_t*>(address), part_bytes - 16});
      }
    }
    ReadTask read(parts);
    start = seconds();
    pool.run(read);
    reads.push_back(bytes / (seconds() - start) * 1e-9);
  }
  const double gbps = median(ours), read_gbps = median(reads);
  const double us = bytes_sum / repetitions / gbps * 1e-3;
  std::printf("%-5s %s T=%lld threads=%d: %.2f GB/s, read %.2f GB/s, fraction %.3f, %.0f us, %.1f GMAC/s\n",
              info.name, kernels.isa, static_cast<long long>(tokens), pool.size(), gbps,
              read_gbps, gbps / read_gbps, us,
              static_cast<double>(tokens * kTopK * 3 * kHidden * kInner) / us * 1e-3);
}
