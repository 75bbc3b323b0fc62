// How a GPU stream and the CPU workers wait for each other: one contract, three mechanisms.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "handshake/coordinator.h"
#include "handshake/driver.h"
#include "handshake/flags.h"

namespace ft::handshake {

enum class Mechanism : std::uint8_t {   // best first
  MemoryOperations,        // the stream writes and waits for flags by itself
  HostCallbacks,           // the driver's own thread does, at 30 to 50 us a call
  StreamSynchronization,   // the caller does, and stands still meanwhile: not capturable
};

// A slot is one place in a step where the CPU works: it has a job with fixed addresses. For each slot,
// submits and waits alternate, in one stream or ordered by events. A captured submit or wait takes place
// at each replay. Everything it names lives until the handshake is destroyed, so graphs are destroyed first.
class Handshake {
 public:
  Handshake(std::shared_ptr<Driver> driver, const CoordinatorOptions& options, bool capturable);
  virtual ~Handshake();
  Handshake(const Handshake&) = delete;
  Handshake& operator=(const Handshake&) = delete;

  virtual std::string name() const = 0;
  bool capturable() const { return capturable_; }

  // Allocates, so not while a stream is being captured.
  int add(Job job);
  // When the stream gets there the job may start: what was put on the stream before is its input.
  // Throws HandshakeError after a failure, before anything is put on the stream.
  void submit(int slot, Stream stream);
  // What is put on the stream from now on comes after the job. Only stream synchronisation throws here if
  // the job failed; the others leave that to `check`.
  void wait(int slot, Stream stream);

  // A graph with so many handshakes is about to be launched: from now on the watchdog looks for them.
  void announce(int handshakes) { coordinator_->expect(handshakes); }
  // Throws HandshakeError if a job failed or nothing moves. Output read before a check that passes, and
  // after the stream was synchronised, is sound.
  void check() const { coordinator_->check(); }
  // After a failed job, with the streams idle: the next step may be tried.
  void clear() { coordinator_->clear(); }
  Coordinator& coordinator() { return *coordinator_; }

  // Lets the device finish what it has, then the coordinator; no submits after this. False: a job never
  // ended, and its memory was left behind. The destructor does the same.
  bool close();

 protected:
  // What the streams and the coordinator touch. If a job never ends it is left behind.
  struct Storage {
    explicit Storage(std::shared_ptr<Driver> driver) : flags(std::move(driver)) {}
    Flags flags;
    std::deque<Word> words;   // of mechanisms that need no memory of the device
    std::deque<Flag> slots;
  };

  virtual Flag make_flag(Storage& storage) = 0;
  virtual void signal(const Flag& flag, Stream stream) = 0;
  virtual void await(const Flag& flag, Stream stream) = 0;

  const std::shared_ptr<Driver> driver_;

 private:
  Flag slot(int index);

  const bool capturable_;
  bool closed_ = false, whole_ = true;
  std::mutex mutex_;   // guards the storage's growth
  std::shared_ptr<Storage> storage_;
  std::unique_ptr<Coordinator> coordinator_;
};

// `capturable` false: as found by a probe that the mechanism works on streams, but not in graphs.
std::unique_ptr<Handshake> make_handshake(Mechanism mechanism, std::shared_ptr<Driver> driver,
                                          const CoordinatorOptions& options, bool capturable);

std::string mechanism_name(Mechanism mechanism, const Driver& driver);

}  // namespace ft::handshake
