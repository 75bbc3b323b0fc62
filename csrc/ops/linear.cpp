#include <algorithm>
#include <span>
#include <vector>

#include "ops/kernel_set.h"
#include "ops/ops.h"
#include "ops/prepared_rows.h"
#include "ops/tiles.h"

namespace ft {
namespace {

// Small products stay on the caller: 2^17 multiplications take about as long as waking a parked lane.
constexpr std::int64_t kSerialProducts = std::int64_t{1} << 17;
// Activations of a tile: as int8 they take half of a second-level cache of 512 KiB that two threads may share.
constexpr std::int64_t kTileActivations = 128 * 1024;
// So few tokens are prepared by the caller beforehand: it takes less time than a barrier.
constexpr std::int64_t kFewTokens = 4;

// Products of several matrices with the same tokens, which are prepared once for each form that the
// matrices' formats read.
class LinearTask final : public Task {
 public:
  LinearTask(const KernelSet& kernels, std::span<const LinearPart> parts, const float* x, std::int64_t tokens)
      : kernels_(kernels), parts_(parts), x_(x), cols_(parts.front().w->cols), tokens_(tokens),
        tile_tokens_(std::clamp<std::int64_t>(kTileActivations / std::max<std::int64_t>(1, cols_) / 4 * 4, 16, 128)),
        token_tiles_(tiles_of(tokens, tile_tokens_)) {
    for (const LinearPart& part : parts) {
      const FormatKernels& format = kernels.format(part.w->format);
      if (form_of(format) == nullptr) forms_.push_back({format.prepare, PreparedRows(format, tokens, cols_)});
      prepares_ |= format.prepare != nullptr;
    }
    if (tokens <= kFewTokens) prepare_all();
  }

  std::int64_t products() const {
    std::int64_t rows = 0;
    for (const LinearPart& part : parts_) rows += part.w->rows;
    return rows * cols_ * tokens_;
  }

  // Before it is run by a pool with these teams: cuts each part's rows into a slice for each.
  void share_out(std::span<const Team> teams) {
    teams_ = teams;
    slices_ = std::vector<Slice>(teams.size());
    for (std::size_t team = 0; team < teams.size(); ++team) {
      slices_[team].runs.reserve(parts_.size());
      for (const LinearPart& part : parts_) {
        const Rows rows = row_slice(teams, team, part.w->rows);
        slices_[team].runs.push_back({part, rows.begin, tiles_of(rows.end - rows.begin, kTileRows) * token_tiles_});
      }
    }
  }

  void run(Lane& lane) override {
    if (prepares_ && tokens_ > kFewTokens) {
      for (std::int64_t t; (t = next_token_.take()) < tokens_;) prepare(t);
      lane.barrier();
    }
    own_team_first(teams_, lane.index(), [&](std::size_t team) { multiply_slice(slices_[team]); });
  }

  void run_alone() {
    if (tokens_ > kFewTokens) prepare_all();
    for (const LinearPart& part : parts_) multiply(part, 0, part.w->rows, 0, tokens_, nullptr);
  }

 private:
  struct Form {
    decltype(FormatKernels::prepare) prepare;
    PreparedRows rows;
  };

  struct Run {   // the tiles of a team's rows of a part, from `row` on
    const LinearPart& part;
    std::int64_t row, tiles;
  };

  struct Tile {
    const Run* run;   // null: there are no more
    std::int64_t row, token;
  };

  struct Slice {
    std::vector<Run> runs;
    TileCounter next_tile;
  };

  Tile tile(const Slice& slice, std::int64_t i) const {   // of all parts, one after the other
    for (const Run& run : slice.runs) {
      if (i < run.tiles) {
        return {&run, run.row + i / token_tiles_ * kTileRows, i % token_tiles_ * tile_tokens_};
      }
      i -= run.tiles;
    }
    return {nullptr, 0, 0};
  }

  // A tile is taken before the one at hand is worked on, so that its beginning can be fetched meanwhile.
  void multiply_slice(Slice& slice) {
    Tile next = tile(slice, slice.next_tile.take());
    while (next.run != nullptr) {
      const Tile now = next;
      next = tile(slice, slice.next_tile.take());
      multiply(now.run->part, now.row, kTileRows, now.token, tile_tokens_, codes_of(next));
    }
  }

  static const std::uint8_t* codes_of(const Tile& tile) {
    if (tile.run == nullptr) return nullptr;
    const PackedMatrix& w = *tile.run->part.w;
    return w.codes + tile.row * w.code_row_stride;
  }

  const Form* form_of(const FormatKernels& format) const {
    for (const Form& form : forms_) {
      if (form.prepare == format.prepare) return &form;
    }
    return nullptr;
  }

  void prepare_all() {
    if (!prepares_) return;
    for (std::int64_t t = 0; t < tokens_; ++t) prepare(t);
  }

  void prepare(std::int64_t t) {
    for (Form& form : forms_) form.rows.prepare(t, 0, cols_, x_ + t * cols_);
  }

  void multiply(const LinearPart& part, std::int64_t row, std::int64_t rows, std::int64_t token,
                std::int64_t tokens, const std::uint8_t* after) const {
    const std::int64_t all_rows = part.w->rows;
    const std::int64_t end = std::min(row + rows, all_rows);
    const TokenRange range{nullptr, token, std::min(tokens, tokens_ - token)};
    float* y = part.y + token * all_rows + row;
    const FormatKernels& format = kernels_.format(part.w->format);
    PackedMatrix w = *part.w;
    w.codes_after = after;
    format.dot(w, row, end, form_of(format)->rows.view(x_), range, y, all_rows);
    if (part.bias == nullptr) return;
    for (std::int64_t j = 0; j < range.count; ++j) {
      for (std::int64_t r = row; r < end; ++r) y[j * all_rows + (r - row)] += part.bias[r];
    }
  }

  const KernelSet& kernels_;
  const std::span<const LinearPart> parts_;
  const float* x_;
  const std::int64_t cols_, tokens_, tile_tokens_, token_tiles_;
  std::vector<Form> forms_;
  bool prepares_ = false;
  TileCounter next_token_;
  std::span<const Team> teams_;
  std::vector<Slice> slices_;   // of each team
};

}  // namespace

void linear(ThreadPool& pool, const KernelSet& kernels, std::span<const LinearPart> parts, const float* x,
            std::int64_t tokens) {
  if (parts.empty()) return;
  LinearTask task(kernels, parts, x, tokens);
  if (task.products() < kSerialProducts) {
    task.run_alone();
  } else {
    task.share_out(pool.teams());
    pool.run(task);
  }
}

}  // namespace ft
