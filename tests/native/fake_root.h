// A directory tree that stands in for "/", with the machine that a test wants.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include <unistd.h>

class FakeRoot {
 public:
  FakeRoot() {
    std::string name = (std::filesystem::temp_directory_path() / "ft_topology_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories((path_ / file).parent_path());
    std::ofstream(path_ / file) << text << "\n";
  }
  void siblings(int cpu, const std::string& list, const char* name = "core_cpus_list") const {
    write("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/" + name, list);
  }
  void node(int node, const std::string& cpus) const {
    write("sys/devices/system/node/node" + std::to_string(node) + "/cpulist", cpus);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};
