// A pool of pinned worker threads. Work is a Task that every lane runs once (SPMD), with barriers
// between its phases and atomic counters to hand out tiles.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "core/teams.h"
#include "core/topology.h"

namespace ft {

class Lane {
 public:
  virtual ~Lane() = default;
  virtual int index() const = 0;
  virtual int count() const = 0;
  // Returns when all lanes of this task have arrived. If a lane has thrown, unwinds the caller with
  // an exception of the pool's own: let it pass.
  virtual void barrier() = 0;
};

class Task {
 public:
  virtual ~Task() = default;
  virtual void run(Lane& lane) = 0;   // called once on each lane
};

// Hands out [0, tiles) in chunks of one, in order, to whoever asks.
class TileCounter {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  std::int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<std::int64_t> next_{0};
};

// Any number of threads may call run, submit and wait at once. A task must not call them. A pool does
// not survive fork(): the child has no worker threads.
class ThreadPool {
 public:
  // One thread per place, pinned to its logical CPU, or left to the scheduler if that is negative. Where
  // the system refuses to pin, the thread runs unpinned (see pinned()). Neighbours of one node are a team.
  explicit ThreadPool(std::span<const Place> places);
  explicit ThreadPool(std::span<const int> cpus);   // all of one node
  ~ThreadPool();   // finishes what was submitted, then joins
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;
  int pinned() const;   // how many of the threads are pinned
  std::span<const Team> teams() const;   // of lanes; never empty

  // Runs the task with the caller as lane 0 and the pool's other threads as lanes 1..n-1. What any
  // lane throws is rethrown here.
  void run(Task& task);

  class Ticket;   // shared state of one submitted task
  // Starts the task on the pool's own n threads and returns at once. Each thread takes tasks in the
  // order of submission. The pool keeps the task alive until it has finished.
  std::shared_ptr<Ticket> submit(std::shared_ptr<Task> task);
  // A ticket that has finished already, for work that turned out to be empty: wakes nobody.
  static std::shared_ptr<Ticket> completed();
  // Returns when it has finished. If lane 0 has not started yet the caller runs it. Rethrows.
  void wait(Ticket& ticket);
  // Whether it has finished. Does not block.
  static bool done(const Ticket& ticket);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ft
