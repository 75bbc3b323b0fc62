// Which processors this process may use: its affinity mask, the physical cores in it and their NUMA
// nodes, and the cgroup's CPU quota. Linux. `root` is "/" but in tests.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <vector>

namespace ft {

// Logical CPUs in the calling thread's affinity mask, ascending. Never empty.
std::vector<int> allowed_cpus();

// Where a thread may run: a logical CPU (-1: whichever the scheduler likes) and its NUMA node.
struct Place {
  int cpu;
  int node = 0;
};

// One logical CPU per physical core, the lowest allowed one, by node and then by number. A CPU of which
// /sys says nothing counts as a core of its own, on node 0.
std::vector<Place> physical_cores(std::span<const int> allowed, const std::filesystem::path& root = "/");

// CPUs' worth of time that the cgroup (v1 or v2, and its ancestors) grants; none: unlimited.
std::optional<double> cpu_quota(const std::filesystem::path& root = "/");

// The place of each of a pool's threads, those of a node side by side. `threads` 0: one per physical core,
// at most ceil(quota). Threads are pinned where each can have a core of its own; if there are fewer than
// cores, every node gives cores in turn, for the memory of each has a bandwidth of its own. Under a quota
// below the number of cores, or with more threads than cores, the scheduler knows better where there is
// room: then none is pinned, and they count as of one node.
std::vector<Place> plan_threads(int threads, std::span<const Place> cores, std::optional<double> quota);

}  // namespace ft
