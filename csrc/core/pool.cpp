#include "core/pool.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/relax.h"
#include "core/topology.h"

namespace ft {
namespace {

// How long to look before parking on a futex. Waking a parked thread took 32 us on a virtual machine (an
// interrupt to a halted processor), and a task with one parked lane 65 us in all; so a decode step, with
// tens of microseconds between its operators and some hundred from step to step, must not find one parked.
constexpr std::chrono::microseconds kLongSpin{1000};
// A wait that may keep another thread from the processor: that of a lane 0 while submitted work is under way,
// because the callers of `run` and `wait` share a processor with the pool's thread 0.
constexpr std::chrono::microseconds kShortSpin{15};
constexpr std::chrono::microseconds kNoSpin{0};
constexpr int kLooksPerClock = 32;   // 20 to 45 ns each, as long as a look at the clock

// Returns once `word` is no longer `old`.
void await_change(const std::atomic<std::uint32_t>& word, std::uint32_t old,
                  std::chrono::microseconds spin) {
  if (word.load(std::memory_order_acquire) != old) return;
  if (spin != kNoSpin) {
    const auto end = std::chrono::steady_clock::now() + spin;
    do {
      for (int i = 0; i < kLooksPerClock; ++i) {
        relax();
        if (word.load(std::memory_order_acquire) != old) return;
      }
    } while (std::chrono::steady_clock::now() < end);
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

struct LaneAborted {};   // unwinds the other lanes of a task of which one lane has thrown

}  // namespace

class ThreadPool::Ticket {
 public:
  // `submitted` counts the submitted tickets of the pool that have not finished; null: of no pool.
  Ticket(Task* task, std::shared_ptr<Task> owner, int lanes, bool spin,
         std::shared_ptr<std::atomic<int>> submitted)
      : task_(task), owner_(std::move(owner)), lanes_(lanes), spin_(spin), submitted_(std::move(submitted)),
        unfinished_(static_cast<std::uint32_t>(lanes)), done_(lanes == 0) {}

  bool claim_lane0() { return !lane0_claimed_.exchange(true, std::memory_order_acq_rel); }
  void run_lane(int index);
  void barrier(int index);
  bool done() const { return done_.load(std::memory_order_acquire) != 0; }
  void await_done() const { await_change(done_, 0, spin_time(0)); }
  void rethrow() const {   // after await_done
    if (error_) std::rethrow_exception(error_);
  }
  int lanes() const { return lanes_; }

 private:
  void fail(std::exception_ptr error);
  std::chrono::microseconds spin_time(int index) const {
    if (!spin_) return kNoSpin;
    return index == 0 && submitted_->load(std::memory_order_relaxed) > 0 ? kShortSpin : kLongSpin;
  }

  Task* task_;
  std::shared_ptr<Task> owner_;   // null for run(): the caller holds the task
  const int lanes_;
  const bool spin_;
  const std::shared_ptr<std::atomic<int>> submitted_;
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::atomic<bool> lane0_claimed_{false};
  std::atomic<bool> failed_{false};
  std::atomic<std::uint32_t> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> phase_{0};
  alignas(64) std::atomic<std::uint32_t> unfinished_;
  std::atomic<std::uint32_t> done_;
};

namespace {

class TicketLane final : public Lane {
 public:
  TicketLane(ThreadPool::Ticket& ticket, int index) : ticket_(ticket), index_(index) {}
  int index() const override { return index_; }
  int count() const override { return ticket_.lanes(); }
  void barrier() override { ticket_.barrier(index_); }

 private:
  ThreadPool::Ticket& ticket_;
  const int index_;
};

}  // namespace

void ThreadPool::Ticket::run_lane(int index) {
  TicketLane lane(*this, index);
  try {
    task_->run(lane);
  } catch (const LaneAborted&) {   // the lane that threw has stored its error
  } catch (...) {
    fail(std::current_exception());
  }
  if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    if (owner_ != nullptr) submitted_->fetch_sub(1, std::memory_order_relaxed);
    owner_.reset();
    done_.store(1, std::memory_order_release);
    done_.notify_all();
  }
}

void ThreadPool::Ticket::barrier(int index) {
  const std::uint32_t phase = phase_.load(std::memory_order_acquire);
  if (failed_.load(std::memory_order_acquire)) throw LaneAborted{};
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(lanes_)) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1, std::memory_order_acq_rel);
    phase_.notify_all();
  } else {
    await_change(phase_, phase, spin_time(index));
  }
  if (failed_.load(std::memory_order_acquire)) throw LaneAborted{};
}

void ThreadPool::Ticket::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(error_mutex_);
    if (!error_) error_ = std::move(error);
  }
  failed_.store(true, std::memory_order_release);   // before phase_ moves: who sees that, sees this
  phase_.fetch_add(1, std::memory_order_acq_rel);
  phase_.notify_all();
}

namespace {

using TicketPtr = std::shared_ptr<ThreadPool::Ticket>;

// A list that grows at its end and that each reader walks with a cursor of its own. An entry dies
// when the last cursor has passed it.
class Feed {
 public:
  struct Node {
    TicketPtr ticket;   // null: no more work
    std::shared_ptr<Node> next;
  };
  struct Cursor {
    std::shared_ptr<Node> node;
    std::uint32_t seen = 0;
  };

  Cursor start() const { return {tail_, 0}; }   // only before the first push

  void push(TicketPtr ticket) {   // one thread at a time
    auto node = std::make_shared<Node>(Node{std::move(ticket), nullptr});
    tail_->next = node;
    tail_ = std::move(node);
    length_.fetch_add(1, std::memory_order_release);
    length_.notify_all();
  }

  const TicketPtr& next(Cursor& cursor, std::chrono::microseconds spin) const {   // blocks until there is one
    await_change(length_, cursor.seen, spin);
    ++cursor.seen;
    cursor.node = cursor.node->next;
    return cursor.node->ticket;
  }

 private:
  std::shared_ptr<Node> tail_ = std::make_shared<Node>();
  alignas(64) std::atomic<std::uint32_t> length_{0};
};

// Signals belong to the program's own threads: Ctrl-C must interrupt them, not a worker.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

bool pin(std::thread& thread, int cpu) {
  if (cpu < 0) return false;
  cpu_set_t* set = CPU_ALLOC(cpu + 1);
  if (set == nullptr) throw std::bad_alloc();
  const std::size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
  CPU_ZERO_S(bytes, set);
  CPU_SET_S(cpu, bytes, set);
  const int error = pthread_setaffinity_np(thread.native_handle(), bytes, set);
  CPU_FREE(set);
  return error == 0;
}

// Whether the calling thread runs on a processor of another NUMA node.
bool away_from(int node) {
  unsigned here = 0;
  return syscall(SYS_getcpu, nullptr, &here, nullptr) == 0 && static_cast<int>(here) != node;
}

// Moves the calling thread to `cpu`; which processors it may use remains as it was.
void move_to(int cpu) {
  cpu_set_t before, only;
  if (cpu >= CPU_SETSIZE || pthread_getaffinity_np(pthread_self(), sizeof before, &before) != 0) return;
  if (!CPU_ISSET(cpu, &before)) return;
  CPU_ZERO(&only);
  CPU_SET(cpu, &only);
  if (pthread_setaffinity_np(pthread_self(), sizeof only, &only) != 0) return;
  pthread_setaffinity_np(pthread_self(), sizeof before, &before);
}

// Neighbours of one node.
std::vector<Team> teams_of(std::span<const Place> places) {
  std::vector<Team> teams;
  for (int lane = 0; lane < static_cast<int>(places.size()); ++lane) {
    const int node = places[static_cast<std::size_t>(lane)].node;
    if (teams.empty() || teams.back().node != node) teams.push_back({node, lane, 0});
    ++teams.back().lanes;
  }
  return teams;
}

std::vector<int> cpus_of(std::span<const Place> places) {
  std::vector<int> cpus;
  for (const Place& place : places) cpus.push_back(place.cpu);
  return cpus;
}

std::vector<Place> on_one_node(std::span<const int> cpus) {
  std::vector<Place> places;
  for (const int cpu : cpus) places.push_back({cpu});
  return places;
}

class SoloLane final : public Lane {
 public:
  int index() const override { return 0; }
  int count() const override { return 1; }
  void barrier() override {}
};

}  // namespace

struct ThreadPool::Impl {
  explicit Impl(std::span<const Place> places);
  ~Impl() { close(); }
  void work(int index, Feed& feed, Feed::Cursor cursor);
  void close();
  void come_home() const;
  void post(const TicketPtr& ticket, bool to_thread0);

  const pid_t process = getpid();
  const int size;
  const bool spin;
  const std::vector<int> cpus;
  const std::vector<Team> teams;
  const std::shared_ptr<std::atomic<int>> submitted = std::make_shared<std::atomic<int>>(0);
  int pinned = 0;
  std::mutex mutex;   // guards the ends of both feeds: a ticket has one place in the order
  Feed workers;       // every task, for threads 1..n-1
  Feed lead;          // submitted tasks, for thread 0
  std::vector<std::thread> threads;
};

ThreadPool::Impl::Impl(std::span<const Place> places)
    : size(static_cast<int>(places.size())),
      // With more threads than processors a spinning thread keeps another one from its work.
      spin(places.size() <= allowed_cpus().size()),
      cpus(cpus_of(places)),
      teams(teams_of(places)) {
  if (cpus.empty()) throw std::invalid_argument("a thread pool needs at least one thread");
  threads.reserve(cpus.size());
  const BlockSignals blocked;
  try {
    for (int index = 0; index < size; ++index) {
      Feed& feed = index == 0 ? lead : workers;
      threads.emplace_back([this, index, &feed, cursor = feed.start()] { work(index, feed, cursor); });
      pinned += pin(threads.back(), cpus[static_cast<std::size_t>(index)]);
    }
  } catch (...) {
    close();
    throw;
  }
}

void ThreadPool::Impl::work(int index, Feed& feed, Feed::Cursor cursor) {
  // Thread 0 shares its processor with the threads that call run: it never spins for work.
  const auto idle = index != 0 && spin ? kLongSpin : kNoSpin;
  while (const TicketPtr& ticket = feed.next(cursor, idle)) {
    if (index != 0 || ticket->claim_lane0()) ticket->run_lane(index);
  }
}

// A caller is lane 0 and belongs where thread 0 is. On the processor of a spinning worker it would keep that
// worker, and so itself, from the task; on another node it would read its slices from afar.
void ThreadPool::Impl::come_home() const {
  const int home = cpus.front();
  const int here = sched_getcpu();
  if (here < 0 || home < 0 || here == home) return;
  const bool on_a_worker = std::find(cpus.begin() + 1, cpus.end(), here) != cpus.end();
  if (on_a_worker || (teams.size() > 1 && away_from(teams.front().node))) move_to(home);
}

void ThreadPool::Impl::close() {
  {
    const std::lock_guard lock(mutex);
    workers.push(nullptr);
    lead.push(nullptr);
  }
  for (std::thread& thread : threads) thread.join();
}

void ThreadPool::Impl::post(const TicketPtr& ticket, bool to_thread0) {
  if (process != getpid()) {
    throw std::runtime_error("the worker threads do not survive a fork: load the model in the child process");
  }
  const std::lock_guard lock(mutex);
  if (size > 1) workers.push(ticket);
  if (to_thread0) lead.push(ticket);
}

ThreadPool::ThreadPool(std::span<const Place> places) : impl_(std::make_unique<Impl>(places)) {}
ThreadPool::ThreadPool(std::span<const int> cpus) : ThreadPool(on_one_node(cpus)) {}
ThreadPool::~ThreadPool() {
  // Threads do not survive a fork: in the child there is nobody to join, and the memory is left alone.
  if (impl_->process != getpid()) static_cast<void>(impl_.release());
}

int ThreadPool::size() const { return impl_->size; }
int ThreadPool::pinned() const { return impl_->pinned; }
std::span<const Team> ThreadPool::teams() const { return impl_->teams; }

void ThreadPool::run(Task& task) {
  if (impl_->size == 1) {
    SoloLane lane;
    return task.run(lane);
  }
  impl_->come_home();
  const auto ticket = std::make_shared<Ticket>(&task, nullptr, impl_->size, impl_->spin, impl_->submitted);
  ticket->claim_lane0();
  impl_->post(ticket, false);
  ticket->run_lane(0);
  ticket->await_done();
  ticket->rethrow();
}

std::shared_ptr<ThreadPool::Ticket> ThreadPool::submit(std::shared_ptr<Task> task) {
  if (task == nullptr) throw std::invalid_argument("submit needs a task");
  Task* raw = task.get();
  auto ticket = std::make_shared<Ticket>(raw, std::move(task), impl_->size, impl_->spin, impl_->submitted);
  impl_->post(ticket, true);
  impl_->submitted->fetch_add(1, std::memory_order_relaxed);   // may come after it has finished: below 0 for a moment
  return ticket;
}

std::shared_ptr<ThreadPool::Ticket> ThreadPool::completed() {
  return std::make_shared<Ticket>(nullptr, nullptr, 0, false, nullptr);
}

void ThreadPool::wait(Ticket& ticket) {
  if (!ticket.done() && ticket.claim_lane0()) {
    impl_->come_home();
    ticket.run_lane(0);
  }
  ticket.await_done();
  ticket.rethrow();
}

bool ThreadPool::done(const Ticket& ticket) { return ticket.done(); }

}  // namespace ft
