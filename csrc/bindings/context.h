// A worker pool and a set of kernels, and the operators run with them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>

#include "bindings/arrays.h"
#include "bindings/weights.h"
#include "ops/kernel_set.h"
#include "core/pool.h"
#include "core/topology.h"
#include "ops/ops.h"

namespace ft::py {

// Expert work on the pool's threads. Holds every array that the work touches until it has finished.
class Pending {
 public:
  Pending(std::shared_ptr<ThreadPool> pool, std::shared_ptr<ThreadPool::Ticket> ticket,
          std::vector<nb::object> arrays)
      : pool_(std::move(pool)), ticket_(std::move(ticket)), arrays_(std::move(arrays)) {}
  ~Pending();
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  bool done() const { return ThreadPool::done(*ticket_); }
  void wait();

 private:
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<ThreadPool::Ticket> ticket_;
  std::vector<nb::object> arrays_;
};

// Operators in the order in which they ran, and the objects whose memory they use.
struct Recording {
  std::vector<std::function<void(ThreadPool&)>> work;
  std::vector<nb::object> uses;
};

// Expert work on fixed arrays, to be run again and again on what they hold, from any thread and without
// the GIL. `uses` keeps the memory behind it alive.
struct ExpertWork {
  std::function<void(std::atomic<std::uint64_t>& progress)> run;
  std::span<double> out;
  std::vector<nb::object> uses;
};

class Context {
 public:
  Context(std::optional<int> threads, const std::optional<std::string>& isa, Precision activations);

  const char* isa() const;
  std::vector<int> cpus() const;
  std::vector<int> nodes() const;
  int threads() const { return static_cast<int>(places_.size()); }
  std::vector<std::string> formats() const;
  void close();

  void place(nb::handle_t<Bank> bank, bool mapped) const;
  void place_matrix(nb::handle_t<Matrix> matrix) const;

  void linear(nb::tuple matrices, Array x, nb::tuple biases, nb::tuple outs) const;
  void embed(nb::handle_t<Matrix> w, Array ids, Array out) const;
  void rms_norm(Array x, Array weight, float eps, Array out) const;
  void add_rms_norm(Array x, Array residual, Array weight, float eps, Array out) const;
  void gated_activation(Array gate, Array up, Activation activation, float alpha, float limit, Array out) const;
  void rotary(Array q, Array k, Array cos, Array sin, bool interleaved) const;
  void write_kv(Array k, Array v, Array k_cache, Array v_cache, Array slots) const;
  void paged_attention(Array q, Array k_cache, Array v_cache, Array block_table, Array sequence,
                       Array positions, float scale, std::optional<std::int64_t> window,
                       std::optional<Array> sinks, Array out) const;
  void route_topk(Array logits, bool renormalize, Array weights, Array ids) const;
  void experts(nb::handle_t<Bank> bank, Array x, Array weights, Array ids, Array out) const;
  void to_float32(Array x, Array out) const;
  std::unique_ptr<Pending> experts_submit(nb::handle_t<Bank> bank, Array x, Array weights, Array ids,
                                          Array out) const;
  ExpertWork expert_work(nb::handle_t<Bank> bank, Array x, Array weights, Array ids, Array out) const;
  std::uint64_t read_bytes(Array data) const;

  void start_recording();
  std::shared_ptr<Recording> stop_recording();
  void replay(const Recording& recording) const;

 private:
  // Runs the work without the GIL, and remembers it if this is a recording. `uses` are the objects behind the
  // addresses that the work holds.
  void perform(std::span<const nb::handle> uses, std::function<void(ThreadPool&)> work) const;
  void perform(std::initializer_list<nb::handle> uses, std::function<void(ThreadPool&)> work) const;
  std::shared_ptr<ThreadPool> pool() const;   // RuntimeError if closed

  std::vector<Place> places_;
  const KernelSet* kernels_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<Recording> recording_;   // null: none under way
};

void bind_context(nb::module_& module);

}  // namespace ft::py
