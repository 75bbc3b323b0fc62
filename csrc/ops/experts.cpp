#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/experts_routes.h"
#include "ops/kernel_set.h"
#include "ops/ops.h"
#include "ops/prepared_rows.h"
#include "ops/tiles.h"

namespace ft {
namespace {

// Gate and up outputs of one pass of tokens over a tile take 16 KiB of the stack.
constexpr std::int64_t kTileFloats = 64 * kTileRows;
// Most floats of one lane's down outputs: they should stay in L2 until they are summed.
constexpr std::int64_t kScratchFloats = std::int64_t{1} << 16;

float factor_of(const ExpertPart& part, std::size_t expert) {
  float factor = 1.0f;
  if (!part.factors.empty()) {
    std::memcpy(&factor, reinterpret_cast<const void*>(part.factors[expert]), sizeof factor);
  }
  return factor;
}

PackedMatrix matrix_of(const ExpertPart& part, std::int32_t expert) {
  PackedMatrix matrix = part.matrix(static_cast<std::size_t>(expert));
  matrix.factor = factor_of(part, static_cast<std::size_t>(expert));
  return matrix;
}

const std::uint8_t* codes_at(const ExpertPart& part, std::int32_t expert, std::int64_t row) {
  return reinterpret_cast<const std::uint8_t*>(part.codes[static_cast<std::size_t>(expert)]) +
         row * part.code_row_stride;
}

// y[j * stride + i] += bias[row + i] for j < count, i < n
void add_bias(const KernelSet& kernels, const ExpertPart& part, std::int32_t expert, std::int64_t row,
              std::int64_t n, float* y, std::int64_t stride, std::int64_t count) {
  if (part.biases.empty()) return;
  const auto* bias = reinterpret_cast<const float*>(part.biases[static_cast<std::size_t>(expert)]) + row;
  for (std::int64_t j = 0; j < count; ++j) kernels.add(bias, y + j * stride, n);
}

// One layer's experts for a batch, in three phases with a barrier after the first and the second:
//   prepare   group the routes; tokens into the form that the formats read
//   gate_up   act(gate x) * (up x) of every route, tile by tile of an expert's rows
//   down      for a tile of output rows, all routes' outputs, then each token's weighted sum
// A part's bias is added to its product at once.
// Routes are kept in grouped order in between. In the last two each team has a slice of the rows, and a lane
// takes tiles from its own team's before it helps with another's.
class ExpertTask final : public Task {
 public:
  ExpertTask(const KernelSet& kernels, const ExpertArgs& args, std::span<const Team> teams)
      : kernels_(kernels),
        args_(args),
        gate_(kernels.format(args.bank->gate.format)),
        up_(kernels.format(args.bank->up.format)),
        down_(kernels.format(args.bank->down.format)),
        hidden_(args.bank->gate.cols),
        inner_(args.bank->gate.rows),
        teams_(teams.begin(), teams.end()),
        lanes_(teams.back().first + teams.back().lanes),
        tile_rows_(inner_tile_rows(down_)),
        tile_tokens_(kTileFloats / tile_rows_),
        routes_(args.tokens, args.top_k, static_cast<std::int64_t>(args.bank->gate.codes.size())),
        slices_(teams.size()) {
    for (std::size_t team = 0; team < teams.size(); ++team) {
      slices_[team].inner = inner_slice(teams, team, *args.bank, down_);
      slices_[team].hidden = row_slice(teams, team, hidden_);
    }
    const std::int64_t routes = args.tokens * args.top_k;
    gate_x_ = PreparedRows(gate_, args.tokens, hidden_);
    if (up_.prepare != gate_.prepare) up_x_ = PreparedRows(up_, args.tokens, hidden_);
    inner_x_ = PreparedRows(down_, routes, inner_);
    if (down_.prepare == nullptr) {
      inner_f32_ = std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(routes * inner_));
    }
    // A multiple of every kernel's row group, so that groups are whole, and a part of kTileRows.
    const std::int64_t fitting = kScratchFloats / std::max<std::int64_t>(1, routes);
    down_rows_ = fitting < kTileRows ? kTileRows / 2 : kTileRows;
    scratch_floats_ = down_rows_ * routes;
    scratch_ = std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(scratch_floats_ * lanes_));
  }

  void run(Lane& lane) override {
    if (lane.count() > lanes_) {
      throw std::logic_error("an expert task made for " + std::to_string(lanes_) + " lanes runs on " +
                             std::to_string(lane.count()));
    }
    prepare(lane);
    lane.barrier();
    const std::size_t own = team_of(teams_, lane.index());
    const std::int64_t first_down = slices_[own].next_down.take();
    const std::uint8_t* down_codes = first_down_codes(slices_[own].hidden, first_down);
    own_team_first(teams_, lane.index(), [&](std::size_t team) { gate_up(slices_[team], down_codes); });
    lane.barrier();
    float* scratch = scratch_.get() + lane.index() * scratch_floats_;
    own_team_first(teams_, lane.index(), [&](std::size_t team) {
      down(slices_[team], team == own ? first_down : slices_[team].next_down.take(), scratch);
    });
  }

 private:
  struct Slice {   // a team's rows of gate and up, and of down
    Rows inner, hidden;
    TileCounter next_gate_up, next_down;
  };

  void prepare(Lane& lane) {
    if (lane.index() == 0) routes_.build(args_.ids, args_.weights);
    if (gate_.prepare == nullptr && up_.prepare == nullptr) return;
    for (std::int64_t t; (t = next_token_.take()) < args_.tokens;) {
      gate_x_.prepare(t, 0, hidden_, args_.x + t * hidden_);
      up_x_.prepare(t, 0, hidden_, args_.x + t * hidden_);
    }
  }

  // A tile is taken before the one at hand is worked on, so that its beginning can be fetched meanwhile:
  // memory does not fall idle from one stretch of weights to the next. `after`: what the lane reads then.
  void gate_up(Slice& slice, const std::uint8_t* after) {
    const Rows rows = slice.inner;
    const std::int64_t row_tiles = tiles_of(rows.end - rows.begin, tile_rows_);
    const std::int64_t tiles = static_cast<std::int64_t>(routes_.groups().size()) * row_tiles;
    const auto group = [&](std::int64_t i) -> const GroupedRoutes::Group& {
      return routes_.groups()[static_cast<std::size_t>(i / row_tiles)];
    };
    const auto row = [&](std::int64_t i) { return rows.begin + i % row_tiles * tile_rows_; };
    for (std::int64_t i = slice.next_gate_up.take(); i < tiles;) {
      const std::int64_t next = slice.next_gate_up.take();
      gate_up_tile(group(i), row(i),
                   next < tiles ? codes_at(args_.bank->gate, group(next).expert, row(next)) : after);
      if (i % row_tiles == 0) advance();
      i = next;
    }
  }

  const std::uint8_t* first_down_codes(const Rows& rows, std::int64_t tile) const {
    const std::int64_t row = rows.begin + tile * down_rows_;
    if (row >= rows.end || routes_.groups().empty()) return nullptr;
    return codes_at(args_.bank->down, routes_.groups().front().expert, row);
  }

  void gate_up_tile(const GroupedRoutes::Group& group, std::int64_t row, const std::uint8_t* after) {
    alignas(64) float gate[kTileFloats];
    alignas(64) float up[kTileFloats];
    PackedMatrix gate_w = matrix_of(args_.bank->gate, group.expert);
    PackedMatrix up_w = matrix_of(args_.bank->up, group.expert);
    gate_w.codes_after = codes_at(args_.bank->up, group.expert, row);
    up_w.codes_after = after;
    const Activations gate_x = gate_x_.view(args_.x);
    const Activations up_x = up_.prepare == gate_.prepare ? gate_x : up_x_.view(args_.x);
    const std::int64_t end = std::min(row + tile_rows_, inner_);
    for (std::int64_t done = 0; done < group.count; done += tile_tokens_) {
      const std::int64_t first = group.first + done;
      const TokenRange tokens{routes_.tokens() + first, 0, std::min(tile_tokens_, group.count - done)};
      gate_.dot(gate_w, row, end, gate_x, tokens, gate, tile_rows_);
      up_.dot(up_w, row, end, up_x, tokens, up, tile_rows_);
      add_bias(kernels_, args_.bank->gate, group.expert, row, end - row, gate, tile_rows_, tokens.count);
      add_bias(kernels_, args_.bank->up, group.expert, row, end - row, up, tile_rows_, tokens.count);
      for (std::int64_t j = 0; j < tokens.count; ++j) {
        float* g = gate + j * tile_rows_;
        kernels_.activate(args_.bank->activation, g, up + j * tile_rows_, g, end - row);
        store_inner(first + j, row, end - row, g);
      }
    }
  }

  void advance() const {
    if (args_.progress != nullptr) args_.progress->fetch_add(1, std::memory_order_relaxed);
  }

  void store_inner(std::int64_t route, std::int64_t row, std::int64_t n, const float* values) {
    if (down_.prepare != nullptr) {
      inner_x_.prepare(route, row, n, values);
    } else {
      std::copy_n(values, n, inner_f32_.get() + route * inner_ + row);
    }
  }

  void down(Slice& slice, std::int64_t first, float* scratch) {
    const Rows rows = slice.hidden;
    const std::int64_t tiles = tiles_of(rows.end - rows.begin, down_rows_);
    for (std::int64_t i = first; i < tiles;) {
      const std::int64_t next = slice.next_down.take();
      const std::int64_t row = rows.begin + i * down_rows_;
      down_tile(row, std::min(row + down_rows_, rows.end), first_down_codes(rows, next), scratch);
      advance();
      i = next;
    }
  }

  void down_tile(std::int64_t row, std::int64_t end, const std::uint8_t* after, float* scratch) const {
    const Activations x = inner_x_.view(inner_f32_.get());
    const auto& groups = routes_.groups();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const GroupedRoutes::Group& group = groups[i];
      float* outputs = scratch + group.first * down_rows_;
      PackedMatrix w = matrix_of(args_.bank->down, group.expert);
      w.codes_after = i + 1 < groups.size() ? codes_at(args_.bank->down, groups[i + 1].expert, row) : after;
      down_.dot(w, row, end, x, {nullptr, group.first, group.count}, outputs, down_rows_);
      add_bias(kernels_, args_.bank->down, group.expert, row, end - row, outputs, down_rows_, group.count);
    }
    for (std::int64_t t = 0; t < args_.tokens; ++t) {
      sum_routes(t, end - row, scratch, args_.y + t * hidden_ + row);
    }
  }

  void sum_routes(std::int64_t t, std::int64_t n, const float* scratch, double* y) const {
    std::fill_n(y, n, 0.0);
    for (std::int64_t k = 0; k < args_.top_k; ++k) {
      const std::int32_t position = routes_.position(t, k);
      if (position < 0) continue;
      kernels_.add_scaled(args_.weights[t * args_.top_k + k], scratch + position * down_rows_, y, n);
    }
  }

  const KernelSet& kernels_;
  const ExpertArgs args_;
  const FormatKernels &gate_, &up_, &down_;
  const std::int64_t hidden_, inner_;
  const std::vector<Team> teams_;
  const int lanes_;
  const std::int64_t tile_rows_, tile_tokens_;
  GroupedRoutes routes_;
  PreparedRows gate_x_, up_x_, inner_x_;   // up_x_ only where it differs from gate_x_
  std::unique_ptr<float[]> inner_f32_;
  std::unique_ptr<float[]> scratch_;   // per lane [routes, down_rows_]
  std::int64_t down_rows_, scratch_floats_;
  TileCounter next_token_;
  std::vector<Slice> slices_;   // of each team
};

}  // namespace

std::unique_ptr<Task> make_expert_task(const KernelSet& kernels, const ExpertArgs& args,
                                       std::span<const Team> teams) {
  return std::make_unique<ExpertTask>(kernels, args, teams);
}

}  // namespace ft
