#include "handshake/probe.h"

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace ft::handshake {
namespace {

using Clock = std::chrono::steady_clock;
using Number = std::uint64_t;

constexpr std::size_t kWords = 32;
constexpr int kNodesPerLayer = 7;
constexpr int kEagerLayers = 8;
// Some jobs are slow, so that a wait which does not wait is seen.
constexpr int kSlowEvery = 16;
constexpr std::chrono::microseconds kSlow{300};
constexpr std::chrono::milliseconds kGrace{500};   // for a stream to end once its waits have been ended

using Row = std::array<Number, kWords>;

// A layer's arithmetic: on the CPU, between two copies of the device's.
Row step(const Row& x, const Row& side, int layer) {
  Row y;
  for (std::size_t i = 0; i < kWords; ++i) {
    y[i] = x[i] * 6364136223846793005u + side[i] + static_cast<Number>(layer) + i;
  }
  return y;
}

Number mixed(Number x) {   // so that inputs of neighbouring rounds have nothing in common
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  return x ^ (x >> 27);
}

struct Refused {
  std::string reason;
};
struct Stuck : Refused {};   // and the device still works on it

// Ends every wait once the time is up, for as long as it lives.
class Guard {
 public:
  Guard(Coordinator& coordinator, std::chrono::milliseconds limit)
      : coordinator_(coordinator), limit_(limit), thread_([this] { watch(); }) {}
  ~Guard() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  bool fired() const { return fired_.load(std::memory_order_acquire); }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit_, [this] { return over_; });
    while (!over_) {
      fired_.store(true, std::memory_order_release);
      coordinator_.fail("the probe's time limit");
      coordinator_.release_all();
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
  }

  Coordinator& coordinator_;
  const std::chrono::milliseconds limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::atomic<bool> fired_{false};
  std::thread thread_;
};

// A step of `layers` handshakes in a chain: what a layer reads is what the one before wrote, so the last
// result tells of every one of them.
class Rehearsal {
 public:
  Rehearsal(std::shared_ptr<Driver> driver, Mechanism mechanism, const ProbeOptions& options);
  ~Rehearsal();

  void prepare();   // these three throw Refused, DriverError or HandshakeError
  void eager();
  void graph();
  std::string late() const;   // why, if it was given up for that

 private:
  struct Layer {   // pinned
    Row side, x, side_copy, out;
  };

  void enqueue(int layers);
  void set_inputs();
  void finish(const std::string& what);
  void compare(const std::string& what, int layers, std::uint64_t jobs);
  [[noreturn]] void explain(const std::string& what, int layers);
  Layer& layer(int i) const { return layers_[i]; }

  std::shared_ptr<Driver> driver_;
  const ProbeOptions options_;
  std::unique_ptr<Handshake> handshake_;
  std::unique_ptr<Guard> guard_;
  Stream stream_ = nullptr;
  Graph graph_ = nullptr;
  Executable executable_ = nullptr;
  Layer* layers_ = nullptr;
  Row* ends_ = nullptr;     // pinned: the first input, the last result, the last copy within the device
  Row* device_ = nullptr;   // x, side, and a copy of x
  Number round_ = 0;
  std::vector<Row> sides_, earlier_sides_;
  Row first_{};
};

Rehearsal::Rehearsal(std::shared_ptr<Driver> driver, Mechanism mechanism, const ProbeOptions& options)
    : driver_(std::move(driver)), options_(options) {
  CoordinatorOptions settings;
  settings.stall_limit = options.time_limit * 2;   // the guard comes first
  handshake_ = make_handshake(mechanism, driver_, settings, true);
  guard_ = std::make_unique<Guard>(handshake_->coordinator(), options.time_limit);
}

void Rehearsal::prepare() {
  driver_->make_current();
  stream_ = driver_->create_stream();
  const auto count = static_cast<std::size_t>(options_.layers);
  layers_ = static_cast<Layer*>(driver_->allocate_pinned(count * sizeof(Layer)));
  ends_ = static_cast<Row*>(driver_->allocate_pinned(3 * sizeof(Row)));
  device_ = static_cast<Row*>(driver_->allocate_device(3 * sizeof(Row)));
  for (int i = 0; i < options_.layers; ++i) {
    handshake_->add({.name = "layer " + std::to_string(i), .run = [this, i](Progress&) {
      if (i % kSlowEvery == 1) std::this_thread::sleep_for(kSlow);
      layer(i).out = step(layer(i).x, layer(i).side_copy, i);
    }});
  }
}

// A failed call leaves the rest to be freed.
Rehearsal::~Rehearsal() {
  const auto freely = [](const auto& call) {
    try {
      call();
    } catch (const DriverError&) {
    }
  };
  if (handshake_ != nullptr) handshake_->close();
  guard_.reset();
  if (graph_ != nullptr) freely([&] { driver_->destroy_graph(graph_); });
  if (executable_ != nullptr) freely([&] { driver_->destroy_executable(executable_); });
  if (stream_ != nullptr) freely([&] { driver_->destroy_stream(stream_); });
  if (device_ != nullptr) freely([&] { driver_->free_device(device_); });
  if (ends_ != nullptr) freely([&] { driver_->free_pinned(ends_); });
  if (layers_ != nullptr) freely([&] { driver_->free_pinned(layers_); });
}

void Rehearsal::enqueue(int layers) {
  const auto copy = [&](Row& to, const Row& from) { driver_->copy_async(&to, &from, sizeof(Row), stream_); };
  copy(device_[0], ends_[0]);
  for (int i = 0; i < layers; ++i) {
    copy(device_[1], layer(i).side);
    copy(layer(i).x, device_[0]);
    copy(layer(i).side_copy, device_[1]);
    handshake_->submit(i, stream_);
    copy(device_[2], device_[0]);   // the device's own work meanwhile
    handshake_->wait(i, stream_);
    copy(device_[0], layer(i).out);
  }
  copy(ends_[1], device_[0]);
  copy(ends_[2], device_[2]);
}

void Rehearsal::set_inputs() {
  ++round_;
  earlier_sides_ = std::exchange(sides_, std::vector<Row>(static_cast<std::size_t>(options_.layers)));
  Number seed = round_ << 40;
  const auto fill = [&](Row& row) {
    for (Number& number : row) number = mixed(++seed);
  };
  fill(first_);
  ends_[0] = first_;
  ends_[1] = ends_[2] = {};
  for (int i = 0; i < options_.layers; ++i) {
    fill(sides_[static_cast<std::size_t>(i)]);
    layer(i).side = sides_[static_cast<std::size_t>(i)];
  }
}

std::string Rehearsal::late() const {
  if (!guard_->fired()) return {};
  return "it did not end within " + std::to_string(options_.time_limit.count()) +
         " ms, and had to be ended: a write or a wait was lost";
}

void Rehearsal::finish(const std::string& what) {
  // Waiting by `synchronize` could not be given up.
  const auto limit = Clock::now() + options_.time_limit + kGrace;
  while (!driver_->finished(stream_)) {
    if (Clock::now() > limit) throw Stuck{{what + " did not end, even when every wait had been ended from the CPU"}};
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (guard_->fired()) throw Refused{what + ": " + late()};
}

void Rehearsal::compare(const std::string& what, int layers, std::uint64_t jobs) {
  const std::uint64_t ran = handshake_->coordinator().completed();
  if (ran != jobs) {
    throw Refused{what + ": the CPU was asked " + std::to_string(ran) + " times, expected " + std::to_string(jobs)};
  }
  Row x = first_, before = first_;
  for (int i = 0; i < layers; ++i) {
    before = x;
    x = step(x, sides_[static_cast<std::size_t>(i)], i);
  }
  if (ends_[1] != x || ends_[2] != before) explain(what, layers);
}

void Rehearsal::explain(const std::string& what, int layers) {
  Row x = first_;
  for (int i = 0; i < layers; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::string where = "handshake " + std::to_string(i) + " of " + std::to_string(layers) + ", about node " +
                              std::to_string(i * kNodesPerLayer);
    if (layer(i).side_copy != sides_[at]) {
      const bool earlier = !earlier_sides_.empty() && layer(i).side_copy == earlier_sides_[at];
      throw Refused{what + " gave a wrong result: at " + where + ", the stream copied " +
                    (earlier ? "what host memory held at an earlier step" : "from a wrong address")};
    }
    if (layer(i).x != x) {
      throw Refused{what + " gave a wrong result: at " + where +
                    ", the stream had not the output of the job before: it did not wait, or copied from a wrong address"};
    }
    x = step(x, sides_[at], i);
  }
  throw Refused{what + " gave a wrong result after the last handshake"};
}

void Rehearsal::eager() {
  const int layers = std::min(kEagerLayers, options_.layers);
  for (int round = 0; round < options_.rounds; ++round) {
    const std::uint64_t before = handshake_->coordinator().completed();
    set_inputs();
    enqueue(layers);
    finish("an eager step");
    compare("an eager step", layers, before + static_cast<std::uint64_t>(layers));
  }
}

void Rehearsal::graph() {
  const std::uint64_t before = handshake_->coordinator().completed();
  set_inputs();
  driver_->begin_capture(stream_);
  try {
    enqueue(options_.layers);
  } catch (...) {
    try {
      graph_ = driver_->end_capture(stream_);
    } catch (const DriverError&) {   // the first error says more
    }
    throw;
  }
  graph_ = driver_->end_capture(stream_);
  finish("the capture");
  if (const std::uint64_t ran = handshake_->coordinator().completed() - before; ran != 0) {
    throw Refused{"capture ran " + std::to_string(ran) + " handshakes instead of recording them"};
  }
  executable_ = driver_->instantiate(graph_);
  std::uint64_t jobs = before;
  for (int replay = 0; replay < options_.rounds; ++replay) {
    const std::string what = "replay " + std::to_string(replay + 1);
    set_inputs();
    const int launches = replay + 1 < options_.rounds ? 1 : 2;   // and two, one behind the other
    for (int i = 0; i < launches; ++i) driver_->launch(executable_, stream_);
    finish(what);
    compare(what, options_.layers, jobs += static_cast<std::uint64_t>(launches * options_.layers));
  }
}

}  // namespace

Finding probe(const std::shared_ptr<Driver>& driver, Mechanism mechanism, const ProbeOptions& options) {
  Finding finding{.mechanism = mechanism, .name = mechanism_name(mechanism, *driver), .reason = {}};
  std::unique_ptr<Rehearsal> rehearsal;
  try {
    if (mechanism == Mechanism::MemoryOperations) {
      if (std::string why = driver->no_memory_operations(); !why.empty()) throw Refused{std::move(why)};
    }
    rehearsal = std::make_unique<Rehearsal>(driver, mechanism, options);
    rehearsal->prepare();
    rehearsal->eager();
    finding.eager = true;
    if (mechanism == Mechanism::StreamSynchronization) throw Refused{"a graph cannot stop for its caller"};
    rehearsal->graph();
    finding.graph = true;
  } catch (const Stuck& stuck) {
    finding.reason = stuck.reason;
    finding.hung = true;
    keep_for_ever(std::shared_ptr<Rehearsal>(std::move(rehearsal)));
  } catch (const Refused& refused) {
    finding.reason = refused.reason;
  } catch (const HandshakeError& error) {
    const std::string late = rehearsal->late();
    finding.reason = late.empty() ? error.what() : late;
  } catch (const DriverError& error) {
    finding.reason = error.what();
  } catch (const std::system_error& error) {
    finding.reason = std::string("its threads could not be started: ") + error.what();
  }
  return finding;
}

Choice choose(const std::shared_ptr<Driver>& driver, const ProbeOptions& options) {
  std::vector<Mechanism> candidates{Mechanism::MemoryOperations};
  if (driver->vendor() == Vendor::Cuda) candidates.push_back(Mechanism::HostCallbacks);
  candidates.push_back(Mechanism::StreamSynchronization);
  std::vector<Finding> findings;
  for (const Mechanism mechanism : candidates) {
    findings.push_back(probe(driver, mechanism, options));
    if (const Finding& last = findings.back(); last.hung) {
      throw DriverError("trying " + last.name + " hung the GPU (" + last.reason + "), so nothing more can be tried; " +
                            "start again with --device cpu, or mend the GPU's driver", -1);
    }
    if (findings.back().graph) return {mechanism, true, std::move(findings)};
  }
  std::string reasons;
  for (const Finding& finding : findings) {
    if (finding.eager) return {finding.mechanism, false, findings};
    reasons += "\n  " + finding.name + ": " + finding.reason;
  }
  throw DriverError("the CPU and the GPU cannot wait for each other on this machine, in any way that is known; use "
                    "--device cpu, or mend the GPU's driver:" + reasons, -1);
}

}  // namespace ft::handshake
