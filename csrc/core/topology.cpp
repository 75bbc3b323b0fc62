#include "core/topology.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <errno.h>
#include <sched.h>

namespace ft {
namespace fs = std::filesystem;
namespace {

std::optional<std::string> first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

template <class Number>
std::optional<Number> parse(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{}) return std::nullopt;
  return value;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

// "0,64" or "0-1,8-9" as numbers; empty if it cannot be read.
std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  for (const std::string& range : split(text, ',')) {
    const std::size_t dash = range.find('-');
    const auto first = parse<int>(std::string_view(range).substr(0, dash));
    const auto last = dash == std::string::npos ? first : parse<int>(std::string_view(range).substr(dash + 1));
    if (!first || !last) return {};
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<int> siblings_of(int cpu, const fs::path& root) {
  const fs::path topology = root / "sys/devices/system/cpu" / ("cpu" + std::to_string(cpu)) / "topology";
  for (const char* name : {"core_cpus_list", "thread_siblings_list"}) {   // the new name and the old
    if (const auto line = first_line(topology / name)) {
      std::vector<int> siblings = parse_cpu_list(*line);
      if (!siblings.empty()) return siblings;
    }
  }
  return {cpu};
}

// The NUMA node of each CPU that /sys assigns to one.
std::map<int, int> nodes_of_cpus(const fs::path& root) {
  std::map<int, int> nodes;
  std::error_code missing;   // a kernel without NUMA has no such directory: the iterator is then at its end
  for (const fs::directory_entry& entry : fs::directory_iterator(root / "sys/devices/system/node", missing)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("node")) continue;
    const auto node = parse<int>(std::string_view(name).substr(4));
    if (!node) continue;
    for (const int cpu : parse_cpu_list(first_line(entry.path() / "cpulist").value_or(""))) nodes[cpu] = *node;
  }
  return nodes;
}

void sort_by_node(std::vector<Place>& places) {
  std::sort(places.begin(), places.end(),
            [](const Place& a, const Place& b) { return std::pair(a.node, a.cpu) < std::pair(b.node, b.cpu); });
}

// cgroup v2: "max 100000" or "150000 100000".
std::optional<double> quota_v2(const fs::path& group) {
  const auto line = first_line(group / "cpu.max");
  if (!line) return std::nullopt;
  const std::vector<std::string> fields = split(*line, ' ');
  if (fields.size() != 2) return std::nullopt;
  const auto quota = parse<double>(fields[0]);
  const auto period = parse<double>(fields[1]);
  if (!quota || !period || *period <= 0) return std::nullopt;
  return *quota / *period;
}

std::optional<double> quota_v1(const fs::path& group) {
  const auto quota_line = first_line(group / "cpu.cfs_quota_us");   // -1: none
  const auto period_line = first_line(group / "cpu.cfs_period_us");
  if (!quota_line || !period_line) return std::nullopt;
  const auto quota = parse<double>(*quota_line);
  const auto period = parse<double>(*period_line);
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return *quota / *period;
}

// The smallest quota of `group` below `mount` and its ancestors. Inside a container the path may
// name directories that only the host has; then the mount itself is the container's group.
template <class Quota>
void lower(std::optional<double>& limit, const fs::path& mount, fs::path group, Quota quota_of) {
  group = group.relative_path();
  while (true) {
    const auto quota = quota_of(mount / group);
    if (quota && (!limit || *quota < *limit)) limit = quota;
    if (group.empty()) return;
    group = group.parent_path();
  }
}

}  // namespace

std::vector<int> allowed_cpus() {
  for (int count = 1024; count <= (1 << 20); count *= 2) {
    cpu_set_t* set = CPU_ALLOC(count);
    if (set == nullptr) throw std::bad_alloc();
    const std::size_t bytes = CPU_ALLOC_SIZE(count);
    std::vector<int> cpus;
    const bool ok = sched_getaffinity(0, bytes, set) == 0;
    const int error = errno;
    for (int cpu = 0; ok && cpu < count; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (ok) return cpus;
    if (error != EINVAL) throw std::system_error(error, std::generic_category(), "sched_getaffinity");
  }
  throw std::system_error(EINVAL, std::generic_category(), "sched_getaffinity");
}

std::vector<Place> physical_cores(std::span<const int> allowed, const fs::path& root) {
  const std::set<int> usable(allowed.begin(), allowed.end());
  const std::map<int, int> nodes = nodes_of_cpus(root);
  std::vector<Place> cores;
  std::set<int> taken;
  for (const int cpu : usable) {
    if (taken.contains(cpu)) continue;
    for (const int sibling : siblings_of(cpu, root)) taken.insert(sibling);
    const auto node = nodes.find(cpu);
    cores.push_back({cpu, node == nodes.end() ? 0 : node->second});
  }
  sort_by_node(cores);
  return cores;
}

std::optional<double> cpu_quota(const fs::path& root) {
  std::optional<double> limit;
  std::ifstream file(root / "proc/self/cgroup");   // lines of hierarchy:controllers:path
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      lower(limit, root / "sys/fs/cgroup", group, quota_v2);
      continue;
    }
    const std::vector<std::string> names = split(controllers, ',');
    if (std::find(names.begin(), names.end(), "cpu") == names.end()) continue;
    for (const std::string& mount : {controllers, std::string("cpu")}) {
      lower(limit, root / "sys/fs/cgroup" / mount, group, quota_v1);
    }
  }
  return limit;
}

std::vector<Place> plan_threads(int threads, std::span<const Place> cores, std::optional<double> quota) {
  const int core_count = static_cast<int>(cores.size());
  const int granted = quota ? std::max(1, static_cast<int>(std::ceil(*quota))) : core_count;
  const int count = threads > 0 ? threads : std::min(core_count, granted);
  if (count > core_count || granted < core_count) {
    return std::vector<Place>(static_cast<std::size_t>(count), Place{-1});
  }
  std::vector<std::pair<int, Place>> turns;   // the n-th core of every node comes in turn n
  std::map<int, int> taken;
  for (const Place& core : cores) turns.emplace_back(taken[core.node]++, core);
  std::stable_sort(turns.begin(), turns.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Place> places;
  for (int i = 0; i < count; ++i) places.push_back(turns[static_cast<std::size_t>(i)].second);
  sort_by_node(places);
  return places;
}

}  // namespace ft
