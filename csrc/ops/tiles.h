// How rows of weights are cut into tiles, and tiles shared out between teams. What a team takes first depends
// on the matrices alone, not on the batch: that is where their bytes are put (ops/placement.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/teams.h"
#include "ops/kernel_set.h"
#include "ops/ops.h"

namespace ft {

// A multiple of every kernel's row group, so that groups are whole.
inline constexpr std::int64_t kTileRows = 32;

constexpr std::int64_t tiles_of(std::int64_t n, std::int64_t tile) { return (n + tile - 1) / tile; }

// Rows of gate and up in one tile: whole blocks of the down projection's activations, so that the lane that
// computed them can also prepare them.
inline std::int64_t inner_tile_rows(const FormatKernels& down) {
  return std::max<std::int64_t>(kTileRows, down.activation_block);
}

inline Rows inner_slice(std::span<const Team> teams, std::size_t team, const ExpertBank& bank,
                        const FormatKernels& down) {
  return slice_of(teams, team, bank.gate.rows, inner_tile_rows(down));
}

// Of down's rows, or of any other matrix's.
inline Rows row_slice(std::span<const Team> teams, std::size_t team, std::int64_t rows) {
  return slice_of(teams, team, rows, kTileRows);
}

}  // namespace ft
