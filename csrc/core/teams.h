// Lanes by NUMA node, and which rows of a weight matrix each node's lanes take first: the rows whose bytes
// lie on that node (ops/placement.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ft {

// The lanes [first, first + lanes) of a pool, whose threads belong to one node. A pool's teams hold every
// lane, in order; on a machine with one node there is one team.
struct Team {
  int node, first, lanes;
};

struct Rows {
  std::int64_t begin, end;
};

inline std::size_t team_of(std::span<const Team> teams, int lane) {
  std::size_t team = 0;
  while (lane >= teams[team].first + teams[team].lanes) ++team;
  return team;
}

// The slice of [0, rows) that belongs to a team: in proportion to its lanes, cut at multiples of `unit`.
inline Rows slice_of(std::span<const Team> teams, std::size_t team, std::int64_t rows, std::int64_t unit) {
  const std::int64_t units = (rows + unit - 1) / unit;
  const std::int64_t lanes = teams.back().first + teams.back().lanes;
  const auto cut = [&](std::int64_t lane) { return std::min(units * lane / lanes * unit, rows); };
  return {cut(teams[team].first), cut(teams[team].first + teams[team].lanes)};
}

// body(team) for the lane's own team, then for the others in turn: a lane helps where work is left.
template <class Body>
void own_team_first(std::span<const Team> teams, int lane, const Body& body) {
  const std::size_t own = team_of(teams, lane);
  for (std::size_t i = 0; i < teams.size(); ++i) body((own + i) % teams.size());
}

}  // namespace ft
