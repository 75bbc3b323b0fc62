// A handshake between GPU streams and the experts of a Context.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>

#include "bindings/context.h"
#include "handshake/handshake.h"

namespace ft::py {

// The arrays and banks of its jobs live as long as it does. The coordinator's thread meets no Python object.
class GpuHandshake {
 public:
  GpuHandshake(std::shared_ptr<handshake::Driver> driver, nb::handle_t<Context> context,
               handshake::Mechanism mechanism, bool capturable, double stall_limit_seconds);
  ~GpuHandshake();
  GpuHandshake(const GpuHandshake&) = delete;
  GpuHandshake& operator=(const GpuHandshake&) = delete;

  std::string name() const { return handshake_->name(); }
  bool capturable() const { return handshake_->capturable(); }
  int slots() { return handshake_->coordinator().slots(); }
  int add_experts(nb::handle_t<Bank> bank, Array x, Array weights, Array ids, Array out, const std::string& name);
  void submit(int slot, std::uintptr_t stream);
  void wait(int slot, std::uintptr_t stream);
  void announce(int handshakes) { handshake_->announce(handshakes); }
  void check() const { handshake_->check(); }
  void clear() { handshake_->clear(); }
  void close();   // RuntimeError if a job never ended

 private:
  bool finish();

  nb::object context_;
  std::vector<nb::object> uses_;
  std::unique_ptr<handshake::Handshake> handshake_;
};

void bind_handshake(nb::module_& module);

}  // namespace ft::py
