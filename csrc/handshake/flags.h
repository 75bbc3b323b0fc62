// One word per slot, through which a GPU stream and the CPU hand work to and fro.
//
//   stream: copies the inputs to pinned memory, word = kReady, ..., waits for word >= kDone, copies the output
//   CPU:    sees kReady, reads the inputs, runs the job, writes the output, word = kDone
//
// All operands are constants, so the same recorded operations serve every replay of a graph.
// Why a replay never takes the last one's kDone for its own: kReady overwrites it, in the stream's order
// before the wait. Why no kReady is lost: the stream writes the next one only after a wait that kDone
// ended, and the CPU writes only between kReady and kDone; at each moment one side alone may write. That
// asks of the caller that a slot's submits and waits alternate, in one stream or ordered by events.
// Ordering: the stream's write comes after a system-wide fence, and after its copies by stream order; it
// pairs with the CPU's acquire load, so who sees kReady sees the inputs. The CPU's release store pairs with
// the stream's wait, so the copies after that see the output.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "handshake/driver.h"

namespace ft::handshake {

inline constexpr std::uint64_t kIdle = 0, kReady = 1, kDone = 2;

using Word = std::atomic<std::uint64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free);

struct Flag {
  Word* word;     // for the CPU
  void* device;   // for stream operations
};

// Hands out flags, kIdle at first. They live until it is destroyed, which must be after the last graph
// that names one.
class Flags {
 public:
  explicit Flags(std::shared_ptr<Driver> driver) : driver_(std::move(driver)) {}
  ~Flags();
  Flags(const Flags&) = delete;
  Flags& operator=(const Flags&) = delete;

  Flag add();

 private:
  std::shared_ptr<Driver> driver_;
  std::vector<FlagBlock> blocks_;
  int used_ = 0;   // of the last block
};

}  // namespace ft::handshake
