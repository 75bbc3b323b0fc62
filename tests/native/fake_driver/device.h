// A GPU as far as a handshake can see it: streams that are threads with an in-order queue, device memory
// that is host memory, graphs that are recorded and replayed. The libraries beside it give it the names of
// CUDA's driver and of HIP.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "faults.h"

namespace fake {

// Both vendors number these alike.
enum Code : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kNotReady = 600,
  kContextDestroyed = 709,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
};

struct Parameters {   // of one memory operation, as HIP lays them out
  std::uint32_t operation;
  void* address;
  std::uint64_t value;
  std::uint32_t flags;
  void* alias;
  std::uint64_t unused;
};
inline constexpr std::uint32_t kWait64 = 4, kWrite64 = 5;

struct Node {
  enum class Kind { Copy, Write, Wait, Call, Nothing } kind;
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
  std::uint64_t value = 0;
  void (*function)(void*) = nullptr;
  void* argument = nullptr;
  const Parameters* parameters = nullptr;   // of a Write or Wait with kShallowParameters
  std::vector<Node*> before = {};
};

struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<Node*> last;   // what the next captured node comes after
};

struct Recording {
  std::vector<Node> nodes;                          // in an order that their dependencies allow
  std::vector<std::vector<std::byte>> first_read;   // what each copy read at the first launch
};

struct Executable {
  std::shared_ptr<Recording> recording;   // replays that are under way have it too
};

struct Stream;

bool is(Fault fault);
int gone();   // kContextDestroyed after a reset, else kSuccess

int stream_create(Stream** stream);
int stream_destroy(Stream* stream);
int stream_synchronize(Stream* stream);
int synchronize_all();
int stream_query(Stream* stream);
int stream_is_capturing(Stream* stream, int* status);
int put(Stream* stream, Node node);      // runs it, or records it if the stream is captured
int run_now(Stream* stream, Node node);   // runs it even so
int memory_operation(Stream* stream, Node::Kind kind, void* word, std::uint64_t value);

int begin_capture(Stream* stream);
int end_capture(Stream* stream, Graph** graph);
Graph* captured(Stream* stream);   // null: it is not being captured
Stream* capturing_into(const Graph* graph);
int instantiate(Graph* graph, Executable** executable);
int launch(Executable* executable, Stream* stream);

int allocate(void** memory, std::size_t bytes);
int release(void* memory);
const char* error_name(int code);
const char* error_text(int code);

}  // namespace fake

#define FAKE_API extern "C" __attribute__((visibility("default")))
