#include "ops/experts_routes.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace ft {

GroupedRoutes::GroupedRoutes(std::int64_t tokens, std::int64_t top_k, std::int64_t experts)
    : count_tokens_(tokens),
      top_k_(top_k),
      next_(static_cast<std::size_t>(experts)),
      tokens_(static_cast<std::size_t>(tokens * top_k)),
      positions_(static_cast<std::size_t>(tokens * top_k)) {
  groups_.reserve(static_cast<std::size_t>(std::min(experts, tokens * top_k)));
}

void GroupedRoutes::build(const std::int32_t* ids, const float* weights) {
  const std::int64_t experts = static_cast<std::int64_t>(next_.size());
  const std::int64_t routes = count_tokens_ * top_k_;
  std::fill(next_.begin(), next_.end(), 0);
  for (std::int64_t i = 0; i < routes; ++i) {
    if (ids[i] < -1 || ids[i] >= experts) {
      throw std::invalid_argument("route " + std::to_string(i % top_k_) + " of token " +
                                  std::to_string(i / top_k_) + " has expert id " + std::to_string(ids[i]) +
                                  ", expected -1 or 0 to " + std::to_string(experts - 1));
    }
    const bool taken = ids[i] >= 0 && weights[i] != 0.0f;
    positions_[static_cast<std::size_t>(i)] = taken ? 0 : -1;
    if (taken) ++next_[static_cast<std::size_t>(ids[i])];
  }
  groups_.clear();
  std::int32_t first = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    std::int32_t& next = next_[static_cast<std::size_t>(e)];
    const std::int32_t count = next;
    if (count != 0) groups_.push_back({static_cast<std::int32_t>(e), first, count});
    next = first;
    first += count;
  }
  for (std::int64_t i = 0; i < routes; ++i) {
    std::int32_t& position = positions_[static_cast<std::size_t>(i)];
    if (position < 0) continue;
    position = next_[static_cast<std::size_t>(ids[i])]++;
    tokens_[static_cast<std::size_t>(position)] = static_cast<std::int32_t>(i / top_k_);
  }
}

}  // namespace ft
