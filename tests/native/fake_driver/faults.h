// What a fake driver can be told to do wrong, as a sum of these: fake_set_fault(int).
#pragma once

namespace fake {

enum Fault : int {
  kNone = 0,
  kUnsupported = 1,            // the attribute says that there are no memory operations, and they fail
  kOperationFails = 2,         // the attribute says that there are, but they fail
  kWriteLost = 4,              // every 50th memory write does not happen
  kRunsAtCapture = 8,          // memory operations run while a stream is captured, and are not recorded
  kStaleAfter200 = 16,         // copies beyond a graph's 200th node read where an earlier node read
  kIgnoresChangedMemory = 32,  // a replay copies what host memory held at the first
  kShallowParameters = 64,     // a node keeps the address of its parameters, not a copy (HIP)
  kCallbackNeverRuns = 128,    // nor is the stream held up by it
  kDeviceReset = 256,          // every call fails, and what was under way is dropped
  kWaitPasses = 512,           // a wait for a value waits for nothing
  kCallbackFails = 1024,       // a callback cannot be put on a stream
  kWaitNeverEnds = 2048,       // a wait for a value goes on when it is there
};

}  // namespace fake
