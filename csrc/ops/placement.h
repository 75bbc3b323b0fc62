// Where the bytes of weights lie on a machine with several NUMA nodes: each row on the node of the team that
// takes it first (ops/tiles.h).
//
// The system puts a page on the node of the thread that touches it first. So a thread of the team touches
// it, which no container forbids (mbind and move_pages need a capability there), and which splits no mapping
// (mbind would make one of every slice of every expert; the system allows 65530). A page that has its place
// stays there: of memory that was written before, or of a file in the page cache, nothing is moved.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "core/pool.h"
#include "formats/format.h"
#include "ops/ops.h"

namespace ft {

enum class Memory : std::uint8_t {
  Fresh,    // of this process, and nobody else uses it now; touched by writing what is there
  Mapped,   // a mapped file; read from disk where it is not in the page cache
};

using Bytes = std::span<const std::uint8_t>;

// Touches every page of the range. Huge pages, which would hold slices of several teams, are refused for it.
void touch_pages(Bytes range, Memory memory);

// Called on a lane of the team that takes the rows of `range` first.
using Touch = std::function<void(const Team&, Bytes range)>;

// All experts of a bank, all rows of a matrix. Nothing is done for a pool of one team. The form with Touch
// is for tests.
void place(ThreadPool&, const KernelSet&, const ExpertBank&, Memory);
void place(ThreadPool&, const PackedMatrix&, Memory);
void place(ThreadPool&, const KernelSet&, const ExpertBank&, const Touch&);
void place(ThreadPool&, const PackedMatrix&, const Touch&);

}  // namespace ft
