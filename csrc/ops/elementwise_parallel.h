// Splits independent items over the pool's lanes, or keeps small work on the caller.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/pool.h"

namespace ft {

// Below this many scalar operations a call stays on the caller: a SIMD core does them in about 10 us,
// which is what waking a parked lane costs.
inline constexpr std::int64_t kSerialOperations = 1 << 16;

inline bool worth_waking(const ThreadPool& pool, std::int64_t items, std::int64_t operations_per_item) {
  return pool.size() > 1 && items > 1 && items * operations_per_item >= kSerialOperations;
}

// body(begin, end) for disjoint ranges that cover [0, items). How the items are cut depends on the
// number of lanes, so an item's result must not depend on its range.
template <class Body>
void parallel_for(ThreadPool& pool, std::int64_t items, std::int64_t operations_per_item, const Body& body) {
  if (!worth_waking(pool, items, operations_per_item)) {
    if (items > 0) body(std::int64_t{0}, items);
    return;
  }
  struct Ranges final : Task {
    const Body& body;
    std::int64_t items, chunk;
    TileCounter next;
    Ranges(const Body& body_, std::int64_t items_, std::int64_t chunk_)
        : body(body_), items(items_), chunk(chunk_) {}
    void run(Lane&) override {
      for (std::int64_t begin; (begin = next.take() * chunk) < items;) {
        body(begin, std::min(begin + chunk, items));
      }
    }
  };
  // Four ranges per lane, so that a lane that is held up leaves its share to the others, but none
  // so small that taking it costs more than doing it.
  const std::int64_t even = (items + 4 * pool.size() - 1) / (4 * pool.size());
  const std::int64_t least = std::max<std::int64_t>(1, 2048 / std::max<std::int64_t>(1, operations_per_item));
  Ranges task(body, items, std::max(even, least));
  pool.run(task);
}

}  // namespace ft
