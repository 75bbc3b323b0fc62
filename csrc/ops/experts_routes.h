// The routes of a batch, grouped by expert, so that an expert that several tokens share is read once.
#pragma once

#include <cstdint>
#include <vector>

namespace ft {

class GroupedRoutes {
 public:
  struct Group {   // the routes [first, first + count) of the grouped order belong to this expert
    std::int32_t expert;
    std::int64_t first, count;
  };

  // Reserves for the largest case, so that `build` allocates nothing.
  GroupedRoutes(std::int64_t tokens, std::int64_t top_k, std::int64_t experts);

  // Routes with id -1 or weight 0 are left out. Throws std::invalid_argument for other ids outside
  // of [0, experts).
  void build(const std::int32_t* ids, const float* weights);

  const std::vector<Group>& groups() const { return groups_; }   // in the order of the expert ids
  // Grouped order to token.
  const std::int32_t* tokens() const { return tokens_.data(); }
  // Where route (t, k) is in the grouped order, or -1 if it was left out.
  std::int32_t position(std::int64_t t, std::int64_t k) const {
    return positions_[static_cast<std::size_t>(t * top_k_ + k)];
  }

 private:
  std::int64_t count_tokens_, top_k_;
  std::vector<std::int32_t> next_;   // [E], a count and then a cursor
  std::vector<std::int32_t> tokens_, positions_;
  std::vector<Group> groups_;
};

}  // namespace ft
