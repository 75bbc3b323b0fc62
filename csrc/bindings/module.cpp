// The extension module freetoken._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/context.h"
#include "bindings/handshake.h"
#include "bindings/weights.h"
#include "core/cpu_features.h"
#include "core/topology.h"

NB_MODULE(_native, module) {
  module.doc() = "The native core: worker pool, kernels and the CPU operators.";
#ifdef NDEBUG
  nanobind::set_leak_warnings(false);   // what a hung device may still touch is left behind on purpose
#endif
  module.def("detected_isas", &ft::host_isas,
             "Instruction sets with kernels in this build that this host can run, best last.");
  module.def(
      "physical_cpus",
      [] {
        std::vector<int> cpus;
        for (const ft::Place& core : ft::physical_cores(ft::allowed_cpus())) cpus.push_back(core.cpu);
        return cpus;
      },
      "One logical CPU per physical core inside the affinity mask, by NUMA node.");
  ft::py::bind_weights(module);
  ft::py::bind_context(module);
  ft::py::bind_handshake(module);
}
