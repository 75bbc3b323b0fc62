#include "handshake/coordinator.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include "core/relax.h"

namespace ft::handshake {
namespace {

using Clock = std::chrono::steady_clock;

// How long after the last handshake to look for the next one without a pause, then between other threads'
// turns, then with naps. A step's handshakes are some hundred microseconds apart.
constexpr std::chrono::microseconds kSpin{2'000}, kYield{20'000}, kShortNaps{1'000'000};
constexpr std::chrono::microseconds kShortNap{50}, kLongNap{500};   // what a handshake may come late
constexpr std::chrono::milliseconds kReleasing{1};
constexpr int kLooksPerClock = 32;

struct Slot {
  Word* word;
  Job job;
};

void pin(std::thread& thread, int cpu) {   // where the system refuses, the thread goes where it likes
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
}

// Signals belong to the program's own threads.
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

}  // namespace

void keep_for_ever(std::shared_ptr<void> state) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(state));
}

struct Coordinator::State {
  explicit State(const CoordinatorOptions& given) : options(given) {
    slots.reserve(static_cast<std::size_t>(options.most_slots));
  }

  void serve();
  void answer(Slot& slot, int index);
  bool claim(int index);
  void skip(Slot& slot);
  void rest(Clock::time_point last_work);
  void watch();
  void release();
  void watch_progress(std::uint64_t& seen, Clock::time_point& since);
  bool any_ready() const;
  bool quiet() const;
  void fail(const std::string& reason);
  void fulfilled();

  const CoordinatorOptions options;
  std::vector<Slot> slots;        // never moves: `count` of them are complete
  std::atomic<int> count{0};
  Progress progress;              // moves whenever a job begins, advances or ends
  std::atomic<std::uint64_t> completed{0};
  std::atomic<int> running{-1};   // the slot whose job runs
  std::atomic<int> expected{0};
  std::atomic<bool> failed{false}, hung{false}, starved{false}, closing{false}, ended{false}, stop_watching{false};

  mutable std::mutex mutex;       // guards reason, and what the two conditions wait for
  std::condition_variable wake_coordinator, wake_watchdog;
  std::string reason;
  std::mutex answering;           // held by who claims or skips a slot: the coordinator, or the watchdog in its place
  std::thread coordinator, watchdog;
};

// ---- the coordinator's thread -------------------------------------------------------------------------------

void Coordinator::State::serve() {
  int at = 0;
  auto last_work = Clock::now();
  for (;;) {
    const int n = count.load(std::memory_order_acquire);
    int found = -1;
    // Slots are filled in the order of the layers: the one after the last is the likeliest.
    for (int k = 0, i = at; k < n && found < 0; ++k, i = i + 1 < n ? i + 1 : 0) {
      if (slots[static_cast<std::size_t>(i)].word->load(std::memory_order_acquire) == kReady) found = i;
    }
    if (found >= 0) {
      answer(slots[static_cast<std::size_t>(found)], found);
      at = found + 1 < n ? found + 1 : 0;
      last_work = Clock::now();
    } else if (closing.load(std::memory_order_acquire)) {
      break;
    } else {
      rest(last_work);
    }
  }
  ended.store(true, std::memory_order_release);
  const std::lock_guard lock(mutex);
  wake_watchdog.notify_all();
}

void Coordinator::State::answer(Slot& slot, int index) {
  if (!claim(index)) return skip(slot);
  progress.advance();
  try {
    slot.job.run(progress);
  } catch (const std::exception& error) {
    fail(slot.job.name + ": " + error.what());
  } catch (...) {
    fail(slot.job.name + ": an exception of an unknown kind");
  }
  progress.advance();
  running.store(-1, std::memory_order_release);
  if (failed.load(std::memory_order_acquire)) return skip(slot);
  fulfilled();   // before: who sees the stream go on, sees it counted
  slot.word->store(kDone, std::memory_order_release);
}

// False: after a failure no job is begun. The watchdog passes over a slot that is claimed, and none is claimed
// while it answers one.
bool Coordinator::State::claim(int index) {
  const std::lock_guard lock(answering);
  if (failed.load(std::memory_order_acquire)) return false;
  running.store(index, std::memory_order_release);
  return true;
}

// The word may be done already: the watchdog answers for a coordinator that is stuck.
void Coordinator::State::skip(Slot& slot) {
  const std::lock_guard lock(answering);
  if (slot.word->load(std::memory_order_acquire) != kReady) return;
  if (slot.job.poison) slot.job.poison();
  fulfilled();   // before: who sees the stream go on, sees it counted
  slot.word->store(kDone, std::memory_order_release);
}

void Coordinator::State::fulfilled() {
  completed.fetch_add(1, std::memory_order_release);
  int before = expected.load(std::memory_order_relaxed);
  while (before > 0 && !expected.compare_exchange_weak(before, before - 1, std::memory_order_release)) {
  }
}

void Coordinator::State::rest(Clock::time_point last_work) {
  const auto idle = Clock::now() - last_work;
  if (options.seat.spin && idle < kSpin) {
    for (int i = 0; i < kLooksPerClock; ++i) relax();
  } else if (idle < kYield) {
    sched_yield();
  } else {
    std::unique_lock lock(mutex);
    wake_coordinator.wait_for(lock, idle < kShortNaps ? kShortNap : kLongNap);
  }
}

// ---- the watchdog's thread ----------------------------------------------------------------------------------

void Coordinator::State::watch() {
  const auto tick = std::max<std::chrono::milliseconds>(options.stall_limit / 8, kReleasing);
  std::uint64_t seen = 0;
  auto since = Clock::now();
  while (!stop_watching.load(std::memory_order_acquire)) {
    {
      std::unique_lock lock(mutex);
      wake_watchdog.wait_for(lock, hung || starved ? kReleasing : tick);
    }
    watch_progress(seen, since);
    if (hung || starved) release();
  }
}

// Where a job is stuck, the watchdog answers what is ready. Where what should be ready is not, it lets all
// streams pass: one of them waits for work that the CPU was never asked for.
void Coordinator::State::release() {
  for (int i = 0, n = count.load(std::memory_order_acquire); i < n; ++i) {
    Slot& slot = slots[static_cast<std::size_t>(i)];
    const bool its_job_runs = i == running.load(std::memory_order_acquire);
    if (!its_job_runs) skip(slot);
    if (its_job_runs || starved) slot.word->store(kDone, std::memory_order_release);
  }
}

void Coordinator::State::watch_progress(std::uint64_t& seen, Clock::time_point& since) {
  const auto now = Clock::now();
  const std::uint64_t count_now = progress.count();
  const int job = running.load(std::memory_order_acquire);
  const int missing = expected.load(std::memory_order_acquire);
  if (count_now != seen || (job < 0 && missing == 0)) {
    seen = count_now;
    since = now;
    return;
  }
  if (now - since < options.stall_limit) return;
  const std::string limit = std::to_string(options.stall_limit.count()) + " ms";
  if (job >= 0) {
    hung.store(true, std::memory_order_release);
    fail(slots[static_cast<std::size_t>(job)].job.name + ": no progress for " + limit + "; the CPU workers are stuck");
  } else if (!any_ready() && !starved.exchange(true)) {
    fail("the GPU has not asked for the CPU's work for " + limit + ", though " + std::to_string(missing) +
         " handshakes were submitted; the stream is stuck, or its flags do not reach the CPU");
  }
}

bool Coordinator::State::any_ready() const {
  for (int i = 0, n = count.load(std::memory_order_acquire); i < n; ++i) {
    if (slots[static_cast<std::size_t>(i)].word->load(std::memory_order_acquire) == kReady) return true;
  }
  return false;
}

bool Coordinator::State::quiet() const {
  return running.load(std::memory_order_acquire) < 0 && !any_ready() &&
         (expected.load(std::memory_order_acquire) == 0 || failed.load(std::memory_order_acquire));
}

void Coordinator::State::fail(const std::string& why) {
  const std::lock_guard lock(mutex);
  if (failed.load(std::memory_order_relaxed)) return;
  reason = why;
  failed.store(true, std::memory_order_release);
  wake_watchdog.notify_all();
}

// ---- for other threads --------------------------------------------------------------------------------------

Seat plan_seat(std::span<const int> workers, std::span<const int> cores, std::span<const int> allowed) {
  const auto taken = [&](int cpu) { return std::find(workers.begin(), workers.end(), cpu) != workers.end(); };
  const bool pinned = !workers.empty() && workers.front() >= 0;
  if (pinned) {
    for (const int core : cores) {
      if (!taken(core)) return {core, true};
    }
  }
  // Its spinning leaves one processor to each other worker, and one to the program's own threads.
  return {pinned ? workers.front() : -1, workers.size() < allowed.size()};
}

Coordinator::Coordinator(const CoordinatorOptions& options) : state_(std::make_shared<State>(options)) {
  const BlockSignals blocked;
  State& state = *state_;
  state.coordinator = std::thread([&state] { state.serve(); });
  try {
    pin(state.coordinator, options.seat.cpu);
    state.watchdog = std::thread([&state] { state.watch(); });
  } catch (...) {
    close();
    throw;
  }
}

Coordinator::~Coordinator() { close(); }

int Coordinator::add(Word* word, Job job) {
  const std::lock_guard lock(state_->mutex);
  if (state_->closing) throw HandshakeError("this handshake is closed");
  if (state_->slots.size() == state_->slots.capacity()) {
    throw HandshakeError("found " + std::to_string(state_->slots.size()) +
                         " handshake slots, expected no more: use fewer batch sizes");
  }
  state_->slots.push_back({word, std::move(job)});
  return state_->count.fetch_add(1, std::memory_order_release);
}

int Coordinator::slots() const { return state_->count.load(std::memory_order_acquire); }
std::uint64_t Coordinator::completed() const { return state_->completed.load(std::memory_order_acquire); }

void Coordinator::expect(int handshakes) {
  State& state = *state_;
  if (handshakes < 0) {
    int before = state.expected.load(std::memory_order_relaxed);
    while (!state.expected.compare_exchange_weak(before, std::max(0, before + handshakes), std::memory_order_release)) {
    }
    return;
  }
  state.progress.advance();   // the limit counts from here
  state.expected.fetch_add(handshakes, std::memory_order_release);
  state.wake_coordinator.notify_one();
}

bool Coordinator::failed() const { return state_->failed.load(std::memory_order_acquire); }

void Coordinator::check() const {
  if (!failed()) return;
  const std::lock_guard lock(state_->mutex);
  throw HandshakeError("the CPU's part of a decode step failed, and its output was dropped: " + state_->reason);
}

void Coordinator::fail(const std::string& reason) { state_->fail(reason); }

void Coordinator::clear() {
  State& state = *state_;
  if (state.hung) check();
  const std::lock_guard lock(state.mutex);
  state.expected.store(0, std::memory_order_release);
  state.reason.clear();
  state.starved.store(false, std::memory_order_release);
  state.failed.store(false, std::memory_order_release);
}

void Coordinator::release_all() {
  State& state = *state_;
  if (!failed()) throw std::logic_error("release_all without a failure would pass off missing work as done");
  for (int i = 0, n = slots(); i < n; ++i) {
    Slot& slot = state.slots[static_cast<std::size_t>(i)];
    if (i != state.running.load(std::memory_order_acquire)) slot.word->store(kDone, std::memory_order_release);
  }
}

bool Coordinator::close() {
  State& state = *state_;
  if (!state.coordinator.joinable()) return !state.hung;
  const auto end = Clock::now() + state.options.stall_limit;
  while (!state.quiet() && !state.hung && Clock::now() < end) std::this_thread::sleep_for(std::chrono::microseconds(200));
  state.closing.store(true, std::memory_order_release);
  state.wake_coordinator.notify_all();
  while (!state.ended && !(state.hung && state.running >= 0)) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  const bool well = state.ended;
  if (well) {
    state.coordinator.join();
  } else {
    state.coordinator.detach();
    keep_for_ever(state_);
  }
  {
    const std::lock_guard lock(state.mutex);
    state.stop_watching.store(true, std::memory_order_release);
    state.wake_watchdog.notify_all();
  }
  if (state.watchdog.joinable()) state.watchdog.join();
  return well;
}

}  // namespace ft::handshake
