#include "core/topology.h"

#include <string>
#include <vector>

#include "check.h"
#include "core/cpu_features.h"
#include "core/pool.h"
#include "fake_root.h"

namespace {

using Places = std::vector<ft::Place>;

void check_places(const Places& found, const Places& expected) {
  CHECK_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    CHECK_EQ(found[i].cpu, expected[i].cpu);
    CHECK_EQ(found[i].node, expected[i].node);
  }
}

// All on node 0.
void check_cpus(const Places& found, const std::vector<int>& expected) {
  Places places;
  for (const int cpu : expected) places.push_back({cpu});
  check_places(found, places);
}

}  // namespace

TEST(one_cpu_per_core) {
  FakeRoot root;
  for (int cpu = 0; cpu < 8; ++cpu) root.siblings(cpu, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6, 7};
  check_cpus(ft::physical_cores(all, root.path()), {0, 1, 2, 3});
}

TEST(only_siblings_inside_the_mask_count) {
  FakeRoot root;
  for (int cpu = 0; cpu < 8; ++cpu) root.siblings(cpu, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
  const std::vector<int> mask{2, 5, 6};
  check_cpus(ft::physical_cores(mask, root.path()), {2, 5});
}

TEST(old_kernels_and_ranges) {
  FakeRoot root;
  for (int cpu = 0; cpu < 4; ++cpu) root.siblings(cpu, cpu < 2 ? "0-1" : "2-3", "thread_siblings_list");
  const std::vector<int> all{0, 1, 2, 3};
  check_cpus(ft::physical_cores(all, root.path()), {0, 2});
}

TEST(without_sys_every_cpu_is_a_core) {
  FakeRoot root;
  root.siblings(1, "not a list");
  const std::vector<int> all{0, 1, 5};
  check_cpus(ft::physical_cores(all, root.path()), {0, 1, 5});
}

// Two sockets that number their cores in turn, as many servers do, with the SMT siblings after all cores.
TEST(cores_come_node_by_node) {
  FakeRoot root;
  for (int cpu = 0; cpu < 12; ++cpu) root.siblings(cpu, std::to_string(cpu % 6) + "," + std::to_string(cpu % 6 + 6));
  root.node(0, "0,2,4,6,8,10");
  root.node(1, "1,3,5,7,9,11");
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  check_places(ft::physical_cores(all, root.path()), {{0, 0}, {2, 0}, {4, 0}, {1, 1}, {3, 1}, {5, 1}});
  const std::vector<int> mask{3, 8, 9, 10};   // 9 is 3's sibling
  check_places(ft::physical_cores(mask, root.path()), {{8, 0}, {10, 0}, {3, 1}});
}

// Nodes 0 and 2 with unequal numbers of cores, 1 outside of the mask, 3 with memory alone, and CPU 9 of none.
TEST(nodes_may_be_uneven_sparse_and_without_cpus) {
  FakeRoot root;
  root.node(0, "0-4");
  root.node(1, "5");
  root.node(2, "6-8");
  root.node(3, "");
  root.write("sys/devices/system/node/possible", "0-3");
  for (const std::string other : {"nodes", "zone5"}) {
    root.write("sys/devices/system/node/" + other + "/cpulist", "0-9");
  }
  const std::vector<int> mask{1, 2, 3, 7, 8, 9};
  check_places(ft::physical_cores(mask, root.path()), {{1, 0}, {2, 0}, {3, 0}, {9, 0}, {7, 2}, {8, 2}});
}

TEST(no_cgroup_no_quota) {
  FakeRoot root;
  CHECK(!ft::cpu_quota(root.path()).has_value());
  root.write("proc/self/cgroup", "0::/user.slice");
  root.write("sys/fs/cgroup/user.slice/cpu.max", "max 100000");
  CHECK(!ft::cpu_quota(root.path()).has_value());
}

TEST(quota_v2_is_the_smallest_on_the_path) {
  FakeRoot root;
  root.write("proc/self/cgroup", "0::/a/b");
  root.write("sys/fs/cgroup/a/b/cpu.max", "400000 100000");
  root.write("sys/fs/cgroup/a/cpu.max", "150000 100000");
  CHECK_NEAR(ft::cpu_quota(root.path()).value(), 1.5, 0);
}

TEST(quota_v2_of_a_container_that_sees_only_its_mount) {
  FakeRoot root;
  root.write("proc/self/cgroup", "0::/docker/0123");
  root.write("sys/fs/cgroup/cpu.max", "200000 100000");
  CHECK_NEAR(ft::cpu_quota(root.path()).value(), 2.0, 0);
}

TEST(quota_v1) {
  FakeRoot root;
  root.write("proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/x");
  root.write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "250000");
  root.write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000");
  CHECK_NEAR(ft::cpu_quota(root.path()).value(), 2.5, 0);
  root.write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "-1");
  CHECK(!ft::cpu_quota(root.path()).has_value());
}

TEST(plan_is_one_pinned_thread_per_core) {
  const Places cores{{0}, {2}, {4}, {6}};
  check_places(ft::plan_threads(0, cores, std::nullopt), cores);
  check_places(ft::plan_threads(0, cores, 4.0), cores);
  check_cpus(ft::plan_threads(2, cores, std::nullopt), {0, 2});
}

TEST(plan_takes_cores_of_all_nodes_in_turn_and_keeps_nodes_together) {
  const Places cores{{0, 0}, {1, 0}, {2, 0}, {4, 1}, {8, 3}, {9, 3}};
  check_places(ft::plan_threads(0, cores, std::nullopt), cores);
  check_places(ft::plan_threads(1, cores, std::nullopt), {{0, 0}});
  check_places(ft::plan_threads(3, cores, std::nullopt), {{0, 0}, {4, 1}, {8, 3}});
  check_places(ft::plan_threads(5, cores, std::nullopt), {{0, 0}, {1, 0}, {4, 1}, {8, 3}, {9, 3}});
}

TEST(plan_leaves_threads_unpinned_where_cores_are_shared) {
  const Places cores{{0}, {2}, {4, 1}, {6, 1}};
  check_cpus(ft::plan_threads(0, cores, 1.5), {-1, -1});   // ceil of the quota
  check_cpus(ft::plan_threads(0, cores, 0.1), {-1});
  check_cpus(ft::plan_threads(6, cores, std::nullopt), std::vector<int>(6, -1));
}

TEST(this_host_has_cpus_and_pins_to_them) {
  const std::vector<int> allowed = ft::allowed_cpus();
  CHECK(!allowed.empty());
  const Places cores = ft::physical_cores(allowed);
  CHECK(!cores.empty() && cores.size() <= allowed.size());
  ft::ThreadPool pool(cores);
  CHECK_EQ(pool.pinned(), static_cast<int>(cores.size()));
}

TEST(isas_start_with_scalar) {
  const auto isas = ft::host_isas();
  CHECK_EQ(isas.front(), std::string("scalar"));
}

FT_TEST_MAIN
