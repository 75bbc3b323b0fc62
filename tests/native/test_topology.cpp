#include "core/topology.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <sched.h>
#include <unistd.h>

#include "check.h"
#include "core/cpu_features.h"
#include "core/pool.h"

namespace fs = std::filesystem;

namespace {

// A directory tree that stands in for "/".
class FakeRoot {
 public:
  FakeRoot() {
    std::string name = (fs::temp_directory_path() / "ft_topology_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  ~FakeRoot() { fs::remove_all(path_); }
  void write(const std::string& file, const std::string& text) const {
    fs::create_directories((path_ / file).parent_path());
    std::ofstream(path_ / file) << text << "\n";
  }
  void siblings(int cpu, const std::string& list, const char* name = "core_cpus_list") const {
    write("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/" + name, list);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void check_cpus(const std::vector<int>& found, const std::vector<int>& expected) {
  CHECK_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) CHECK_EQ(found[i], expected[i]);
}

}  // namespace

TEST(one_cpu_per_core) {
  FakeRoot root;
  for (int cpu = 0; cpu < 8; ++cpu) root.siblings(cpu, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6, 7};
  check_cpus(ft::physical_cpus(all, root.path()), {0, 1, 2, 3});
}

TEST(only_siblings_inside_the_mask_count) {
  FakeRoot root;
  for (int cpu = 0; cpu < 8; ++cpu) root.siblings(cpu, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
  const std::vector<int> mask{2, 5, 6};
  check_cpus(ft::physical_cpus(mask, root.path()), {2, 5});
}

TEST(old_kernels_and_ranges) {
  FakeRoot root;
  for (int cpu = 0; cpu < 4; ++cpu) root.siblings(cpu, cpu < 2 ? "0-1" : "2-3", "thread_siblings_list");
  const std::vector<int> all{0, 1, 2, 3};
  check_cpus(ft::physical_cpus(all, root.path()), {0, 2});
}

TEST(without_sys_every_cpu_is_a_core) {
  FakeRoot root;
  root.siblings(1, "not a list");
  const std::vector<int> all{0, 1, 5};
  check_cpus(ft::physical_cpus(all, root.path()), {0, 1, 5});
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
  const std::vector<int> cores{0, 2, 4, 6};
  check_cpus(ft::plan_threads(0, cores, std::nullopt), cores);
  check_cpus(ft::plan_threads(0, cores, 4.0), cores);
  check_cpus(ft::plan_threads(2, cores, std::nullopt), {0, 2});
}

TEST(plan_leaves_threads_unpinned_where_cores_are_shared) {
  const std::vector<int> cores{0, 2, 4, 6};
  check_cpus(ft::plan_threads(0, cores, 1.5), {-1, -1});   // ceil of the quota
  check_cpus(ft::plan_threads(0, cores, 0.1), {-1});
  check_cpus(ft::plan_threads(6, cores, std::nullopt), std::vector<int>(6, -1));
}

TEST(this_host_has_cpus_and_pins_to_them) {
  const std::vector<int> allowed = ft::allowed_cpus();
  CHECK(!allowed.empty());
  const std::vector<int> cores = ft::physical_cpus(allowed);
  CHECK(!cores.empty() && cores.size() <= allowed.size());
  ft::ThreadPool pool(cores);
  CHECK_EQ(pool.pinned(), static_cast<int>(cores.size()));
}

TEST(isas_start_with_scalar) {
  const auto isas = ft::host_isas();
  CHECK_EQ(isas.front(), std::string("scalar"));
}

FT_TEST_MAIN
