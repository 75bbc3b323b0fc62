// What the tests of the handshake share: the fake drivers, and a step whose result tells of every handshake.
#pragma once

#include <dlfcn.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_driver/faults.h"
#include "handshake/handshake.h"
#include "handshake/probe.h"

namespace handshake_support {

using namespace ft::handshake;
using namespace std::chrono_literals;

inline const char* library(Vendor vendor) { return vendor == Vendor::Cuda ? FT_FAKE_CUDA : FT_FAKE_HIP; }

// A driver that does some things wrong while this lives.
class Fake {
 public:
  explicit Fake(Vendor vendor, int faults = fake::kNone) {
    void* handle = dlopen(library(vendor), RTLD_NOW);
    CHECK(handle != nullptr);
    set_ = reinterpret_cast<void (*)(int)>(dlsym(handle, "fake_set_fault"));
    CHECK(set_ != nullptr);
    set_(fake::kNone);
    driver = Driver::open(vendor, library(vendor));
    set_(faults);
  }
  ~Fake() { set_(fake::kNone); }
  void set(int faults) { set_(faults); }

  std::shared_ptr<Driver> driver;

 private:
  void (*set_)(int);
};

inline CoordinatorOptions quick(std::chrono::milliseconds stall_limit = 20'000ms) {
  CoordinatorOptions options;
  options.stall_limit = stall_limit;
  return options;
}

using Row = std::array<std::uint64_t, 16>;

template <class Call>
void freely(Call call) {   // also on a device that is gone
  try {
    call();
  } catch (const DriverError&) {
  }
}

// x = x * 3 + side of the layer + 1, on the CPU, layer by layer; inputs and outputs are in pinned memory.
class Step {
 public:
  Step(Fake& fake, Handshake& handshake, int layers)
      : driver_(*fake.driver), handshake_(handshake), layers_(layers), slots_(static_cast<std::size_t>(layers)) {
    stream = driver_.create_stream();
    pinned_ = static_cast<Row*>(driver_.allocate_pinned(sizeof(Row) * static_cast<std::size_t>(3 * layers + 2)));
    device_ = static_cast<Row*>(driver_.allocate_device(sizeof(Row)));
    for (int i = 0; i < layers; ++i) {
      slots_[static_cast<std::size_t>(i)] = handshake.add({.name = "layer " + std::to_string(i), .run = [=, this](Progress&) {
        for (std::size_t w = 0; w < std::tuple_size_v<Row>; ++w) out(i)[w] = in(i)[w] * 3 + side(i)[w] + 1;
      }});
    }
  }
  ~Step() {   // after the handshake is closed
    freely([&] { if (executable_ != nullptr) driver_.destroy_executable(executable_); });
    freely([&] { driver_.destroy_stream(stream); });
    freely([&] { driver_.free_device(device_); });
    freely([&] { driver_.free_pinned(pinned_); });
  }

  void set_inputs(std::uint64_t seed) {
    for (std::uint64_t& number : first()) number = seed * 77 + 5;
    for (int i = 0; i < layers_; ++i) side(i).fill(seed * 1000 + static_cast<std::uint64_t>(i));
    last().fill(0);
  }
  void enqueue() {
    driver_.copy_async(device_, &first(), sizeof(Row), stream);
    for (int i = 0; i < layers_; ++i) {
      driver_.copy_async(&in(i), device_, sizeof(Row), stream);
      handshake_.submit(slots_[static_cast<std::size_t>(i)], stream);
      handshake_.wait(slots_[static_cast<std::size_t>(i)], stream);
      driver_.copy_async(device_, &out(i), sizeof(Row), stream);
    }
    driver_.copy_async(&last(), device_, sizeof(Row), stream);
  }
  void capture() {
    driver_.begin_capture(stream);
    enqueue();
    const Graph graph = driver_.end_capture(stream);
    executable_ = driver_.instantiate(graph);
    driver_.destroy_graph(graph);
  }
  void replay() { driver_.launch(executable_, stream); }
  bool correct() {   // of a step that has ended
    Row x = first();
    for (int i = 0; i < layers_; ++i) {
      for (std::size_t w = 0; w < x.size(); ++w) x[w] = x[w] * 3 + side(i)[w] + 1;
    }
    return last() == x;
  }

  Stream stream = nullptr;

 private:
  Row& in(int i) { return pinned_[3 * i]; }
  Row& side(int i) { return pinned_[3 * i + 1]; }
  Row& out(int i) { return pinned_[3 * i + 2]; }
  Row& first() { return pinned_[3 * layers_]; }
  Row& last() { return pinned_[3 * layers_ + 1]; }

  Driver& driver_;
  Handshake& handshake_;
  const int layers_;
  std::vector<int> slots_;
  Row *pinned_ = nullptr, *device_ = nullptr;
  Executable executable_ = nullptr;
};

// Whether it comes true within some seconds.
template <class Condition>
bool soon(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + 20s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

}  // namespace handshake_support
