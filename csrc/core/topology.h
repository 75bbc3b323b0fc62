// Which processors this process may use: its affinity mask, the physical cores in it, and the
// cgroup's CPU quota. Linux. `root` is "/" but in tests.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <vector>

namespace ft {

// Logical CPUs in the calling thread's affinity mask, ascending. Never empty.
std::vector<int> allowed_cpus();

// One logical CPU per physical core, the lowest allowed one, ascending. A CPU of which /sys says
// nothing counts as a core of its own.
std::vector<int> physical_cpus(std::span<const int> allowed, const std::filesystem::path& root = "/");

// CPUs' worth of time that the cgroup (v1 or v2, and its ancestors) grants; none: unlimited.
std::optional<double> cpu_quota(const std::filesystem::path& root = "/");

// The CPU of each of a pool's threads, -1 for those not to pin. `threads` 0: one per physical core,
// at most ceil(quota). Threads are pinned where each can have a core of its own. Under a quota below the number of
// cores, or with more threads than cores, the scheduler knows better where there is room.
std::vector<int> plan_threads(int threads, std::span<const int> cores, std::optional<double> quota);

}  // namespace ft
