#include "ops/placement.h"

#include <algorithm>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "ops/kernel_set.h"
#include "ops/tiles.h"

namespace ft {
namespace {

// Rows of a matrix that a lane places at a time.
constexpr std::int64_t kPieceRows = 32 * kTileRows;

// Where the blocks of some rows lie: from the first byte to the last, with what is between them.
Bytes bytes_of(const std::uint8_t* start, std::int64_t row_stride, std::int64_t block_stride,
               std::int64_t block_bytes, std::int64_t blocks, const Rows& rows) {
  if (rows.begin >= rows.end) return {};
  const std::int64_t size = (rows.end - rows.begin - 1) * row_stride + (blocks - 1) * block_stride + block_bytes;
  return {start + rows.begin * row_stride, static_cast<std::size_t>(size)};
}

// The part of `rows` that shares no scale with rows before it, in rows of scales.
Rows scale_rows(const Rows& rows, std::int64_t shared) {
  return {tiles_of(rows.begin, shared), tiles_of(rows.end, shared)};
}

void place_rows(const Team& team, const PackedMatrix& m, const Rows& rows, const Touch& touch) {
  const FormatInfo& info = format_info(m.format);
  const Bytes codes = bytes_of(m.codes, m.code_row_stride, m.code_block_stride, info.codes_bytes,
                               m.cols / info.block_elements, rows);
  if (!codes.empty()) touch(team, codes);
  if (info.scales_bytes == 0) return;
  const std::int64_t columns = info.scale_cols > 0 ? info.scale_cols : info.block_elements;
  const Bytes scales = bytes_of(m.scales, m.scale_row_stride, m.scale_block_stride, info.scales_bytes,
                                tiles_of(m.cols, columns), scale_rows(rows, std::max(1, info.scale_rows)));
  if (!scales.empty()) touch(team, scales);
}

// body(team, i) for i = 0, 1, ... on lanes of that team alone, until it returns false.
template <class Body>
class TeamTask final : public Task {
 public:
  TeamTask(std::span<const Team> teams, const Body& body) : teams_(teams), body_(body), next_(teams.size()) {}

  void run(Lane& lane) override {
    const std::size_t team = team_of(teams_, lane.index());
    while (body_(team, next_[team].take())) {}
  }

 private:
  const std::span<const Team> teams_;
  const Body& body_;
  std::vector<TileCounter> next_;
};

Touch toucher(Memory memory) {
  return [memory](const Team&, Bytes range) { touch_pages(range, memory); };
}

}  // namespace

void touch_pages(Bytes range, Memory memory) {
  if (range.empty()) return;
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(range.data());
  const std::uintptr_t end = begin + range.size();
  const std::uintptr_t first = begin / page * page;
  madvise(reinterpret_cast<void*>(first), end - first, MADV_NOHUGEPAGE);   // refused where there are none
  for (std::uintptr_t at = begin; at < end; at = (at / page + 1) * page) {
    auto* byte = reinterpret_cast<volatile std::uint8_t*>(at);
    const std::uint8_t value = *byte;
    if (memory == Memory::Fresh) *byte = value;
  }
}

void place(ThreadPool& pool, const KernelSet& kernels, const ExpertBank& bank, const Touch& touch) {
  const std::span<const Team> teams = pool.teams();
  if (teams.size() == 1) return;
  const FormatKernels& down = kernels.format(bank.down.format);
  const auto place_expert = [&](std::size_t team, std::int64_t i) {
    const auto expert = static_cast<std::size_t>(i);
    if (expert >= bank.gate.codes.size()) return false;
    const Rows inner = inner_slice(teams, team, bank, down);
    place_rows(teams[team], bank.gate.matrix(expert), inner, touch);
    place_rows(teams[team], bank.up.matrix(expert), inner, touch);
    place_rows(teams[team], bank.down.matrix(expert), row_slice(teams, team, bank.down.rows), touch);
    return true;
  };
  TeamTask task(teams, place_expert);
  pool.run(task);
}

void place(ThreadPool& pool, const PackedMatrix& matrix, const Touch& touch) {
  const std::span<const Team> teams = pool.teams();
  if (teams.size() == 1) return;
  const auto place_piece = [&](std::size_t team, std::int64_t i) {
    const Rows rows = row_slice(teams, team, matrix.rows);
    const std::int64_t begin = rows.begin + i * kPieceRows;
    if (begin >= rows.end) return false;
    place_rows(teams[team], matrix, {begin, std::min(begin + kPieceRows, rows.end)}, touch);
    return true;
  };
  TeamTask task(teams, place_piece);
  pool.run(task);
}

void place(ThreadPool& pool, const KernelSet& kernels, const ExpertBank& bank, Memory memory) {
  place(pool, kernels, bank, toucher(memory));
}

void place(ThreadPool& pool, const PackedMatrix& matrix, Memory memory) { place(pool, matrix, toucher(memory)); }

}  // namespace ft
