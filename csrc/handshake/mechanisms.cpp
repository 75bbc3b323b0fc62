// The three mechanisms.
#include <thread>

#include "core/relax.h"
#include "handshake/handshake.h"

namespace ft::handshake {
namespace {

constexpr int kSpins = 10'000;   // half a millisecond at most: longer than a layer's experts take as a rule

void await_done(const Word& word) {   // the watchdog sees to it that this ends
  for (int i = 0; word.load(std::memory_order_acquire) != kDone; ++i) {
    if (i < kSpins) {
      relax();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

class MemoryOperations final : public Handshake {
 public:
  using Handshake::Handshake;
  std::string name() const override { return mechanism_name(Mechanism::MemoryOperations, *driver_); }

 protected:
  Flag make_flag(Storage& storage) override { return storage.flags.add(); }
  void signal(const Flag& flag, Stream stream) override { driver_->write_value(stream, flag.device, kReady); }
  void await(const Flag& flag, Stream stream) override { driver_->wait_value(stream, flag.device, kDone); }
};

// The callbacks call no driver function, as they may not. A driver has one thread for them, which stands
// still in `await`; the job needs no callback to end, so it is freed.
class HostCallbacks final : public Handshake {
 public:
  using Handshake::Handshake;
  std::string name() const override { return mechanism_name(Mechanism::HostCallbacks, *driver_); }

 protected:
  Flag make_flag(Storage& storage) override { return {&storage.words.emplace_back(kIdle), nullptr}; }
  void signal(const Flag& flag, Stream stream) override {
    driver_->call_host(
        stream, [](void* word) { static_cast<Word*>(word)->store(kReady, std::memory_order_release); }, flag.word);
  }
  void await(const Flag& flag, Stream stream) override {
    driver_->call_host(stream, [](void* word) { await_done(*static_cast<Word*>(word)); }, flag.word);
  }
};

class StreamSynchronization final : public Handshake {
 public:
  using Handshake::Handshake;
  std::string name() const override { return mechanism_name(Mechanism::StreamSynchronization, *driver_); }

 protected:
  Flag make_flag(Storage& storage) override { return {&storage.words.emplace_back(kIdle), nullptr}; }
  void signal(const Flag& flag, Stream stream) override {
    driver_->synchronize(stream);
    flag.word->store(kReady, std::memory_order_release);
  }
  void await(const Flag& flag, Stream) override {
    if (flag.word->load(std::memory_order_acquire) == kIdle) {
      throw HandshakeError("found a wait for a slot that was never submitted, expected its submit first");
    }
    await_done(*flag.word);
    check();
  }
};

}  // namespace

std::unique_ptr<Handshake> make_handshake(Mechanism mechanism, std::shared_ptr<Driver> driver,
                                          const CoordinatorOptions& options, bool capturable) {
  switch (mechanism) {
    case Mechanism::MemoryOperations:
      return std::make_unique<MemoryOperations>(std::move(driver), options, capturable);
    case Mechanism::HostCallbacks:
      return std::make_unique<HostCallbacks>(std::move(driver), options, capturable);
    case Mechanism::StreamSynchronization:
      break;
  }
  return std::make_unique<StreamSynchronization>(std::move(driver), options, false);
}

std::string mechanism_name(Mechanism mechanism, const Driver& driver) {
  switch (mechanism) {
    case Mechanism::MemoryOperations: return driver.memory_operations_name();
    case Mechanism::HostCallbacks: return "host callbacks";
    case Mechanism::StreamSynchronization: break;
  }
  return "stream synchronisation";
}

}  // namespace ft::handshake
