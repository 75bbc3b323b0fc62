// The thread that runs the CPU's side of every handshake, and the watchdog over it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "handshake/flags.h"

namespace ft::handshake {

// A step failed; its output is not to be used.
class HandshakeError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A long job says through this that it is alive.
class Progress {
 public:
  void advance() { count_.fetch_add(1, std::memory_order_relaxed); }
  std::uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  std::atomic<std::uint64_t>& counter() { return count_; }

 private:
  std::atomic<std::uint64_t> count_{0};
};

struct Job {
  std::string name;                      // for error messages
  std::function<void(Progress&)> run;
  std::function<void()> poison = {};     // after a failed or skipped run: makes the output unusable
};

// The coordinator's processor: one that no worker has if there is one, else that of the pool's first thread,
// whose part the coordinator takes when it runs a task. It spins only where that keeps nobody from work.
struct Seat {
  int cpu;   // -1: the scheduler's choice
  bool spin;
};
Seat plan_seat(std::span<const int> workers, std::span<const int> cores, std::span<const int> allowed);

struct CoordinatorOptions {
  Seat seat{-1, false};
  // A job that neither ends nor advances for so long, or announced handshakes none of which comes for so
  // long, are an error.
  std::chrono::milliseconds stall_limit{30'000};
  int most_slots = 1 << 14;
};

// Keeps what a thread that never ends may still touch.
void keep_for_ever(std::shared_ptr<void> state);

// After a failure every handshake is answered at once, without its job, so that no stream waits for ever;
// the error is for whoever calls `check`.
class Coordinator {
 public:
  explicit Coordinator(const CoordinatorOptions& options);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  int add(Word* word, Job job);   // the number of its slot
  int slots() const;
  std::uint64_t completed() const;   // handshakes answered, failed ones too

  // So many handshakes have been given to a stream (or, negative, were not after all).
  void expect(int handshakes);
  bool failed() const;
  void check() const;                    // throws HandshakeError if failed
  void fail(const std::string& reason);  // the first reason stays
  // Forgets a failed job. The streams must be idle. Throws if the coordinator itself is stuck.
  void clear();
  // Lets every stream pass that waits for a slot, whether it was ready or not. Only after a failure.
  void release_all();

  // Returns when the handshakes that were announced or are ready have been answered, or the stall limit has
  // passed, and the threads have ended. False: a job never ended; its thread and what it may touch are left
  // behind, and the flags must not be freed.
  bool close();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ft::handshake
