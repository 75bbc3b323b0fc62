// What the tests of the operators share: the kernels of this host, pools of several sizes, numbers.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "core/cpu_features.h"
#include "core/pool.h"
#include "ops/kernel_set.h"
#include "ops/ops.h"

namespace ops_support {

inline const std::vector<const ft::KernelSet*>& all_kernels() {
  static const std::vector<const ft::KernelSet*> sets = [] {
    std::vector<const ft::KernelSet*> found;
    for (const std::string& isa : ft::host_isas()) found.push_back(&ft::select_kernels(isa.c_str()));
    return found;
  }();
  return sets;
}

// Unpinned pools of 1, 2, 3 and 5 threads; results must not depend on which one is used.
inline const std::vector<std::unique_ptr<ft::ThreadPool>>& pools() {
  static const std::vector<std::unique_ptr<ft::ThreadPool>> all = [] {
    std::vector<std::unique_ptr<ft::ThreadPool>> made;
    for (const std::size_t threads : {1, 2, 3, 5}) {
      made.push_back(std::make_unique<ft::ThreadPool>(std::vector<int>(threads, -1)));
    }
    return made;
  }();
  return all;
}

// Normal numbers times `scale`, the same for the same seed.
inline std::vector<float> random_floats(std::int64_t n, unsigned seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = scale * normal(generator);
  return x;
}

}  // namespace ops_support
