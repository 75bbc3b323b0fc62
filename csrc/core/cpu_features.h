// What this processor can run.
#pragma once

#include <string>
#include <vector>

namespace ft {

// The instruction sets that this build has kernels for and that this host can run, best last.
std::vector<std::string> host_isas();

}  // namespace ft
