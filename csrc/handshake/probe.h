// Which mechanisms work on this machine. Each is tried by really doing what a decode step does with it:
// drivers have recorded memory operations that were never replayed, and replayed long graphs with the
// addresses of other nodes, without an error.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "handshake/driver.h"
#include "handshake/handshake.h"

namespace ft::handshake {

struct ProbeOptions {
  int layers = 60;    // 7 graph nodes each: as long as a decode step's graph
  int rounds = 4;     // eager steps, and replays, each with other inputs
  std::chrono::milliseconds time_limit{10'000};   // of all that one mechanism does; a busy host is slow
};

struct Finding {
  Mechanism mechanism;
  std::string name;
  bool eager = false, graph = false;   // whether it works on a stream; in a replayed graph
  std::string reason;   // why not both; empty: it does both
  bool hung = false;    // nothing ended it: whatever waits for this device from now on may wait for ever
};

// Never hangs: a wait that nothing ends is ended from the CPU, and the mechanism is refused; where even that does
// not help, what it had is left behind. Throws nothing but std::bad_alloc.
Finding probe(const std::shared_ptr<Driver>& driver, Mechanism mechanism, const ProbeOptions& options = {});

struct Choice {
  Mechanism mechanism;
  bool capturable;
  std::vector<Finding> findings;   // of all that were tried, in order
};

// The first that works in graphs, else the first that works on streams. ROCm's host callbacks are not tried:
// they have given wrong results on replay. Throws DriverError if nothing works, or one hung the device.
Choice choose(const std::shared_ptr<Driver>& driver, const ProbeOptions& options = {});

}  // namespace ft::handshake
