#include "device.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace fake {
namespace {

std::atomic<int> faults{0};
std::atomic<int> capturing_streams{0};
std::atomic<unsigned> writes{0};

std::uint64_t load(const void* word) {
  return __atomic_load_n(static_cast<const std::uint64_t*>(word), __ATOMIC_ACQUIRE);
}
void store(void* word, std::uint64_t value) {
  __atomic_store_n(static_cast<std::uint64_t*>(word), value, __ATOMIC_RELEASE);
}

std::mutex streams_mutex;
std::set<Stream*> streams;

}  // namespace

struct Work {
  Node node;
  std::shared_ptr<Recording> of = nullptr;   // of a replay, and which node of it
  std::size_t index = 0;
};

struct Stream {
  Stream() : thread([this] { serve(); }) {}
  ~Stream() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    thread.join();
  }

  void serve();
  void run(const Work& work);
  void copy(const Work& work);
  bool abandoned() const { return stopping || is(kDeviceReset); }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  bool busy = false;
  std::atomic<bool> stopping{false};
  std::unique_ptr<Graph> graph;   // while it is captured
  bool invalid = false;
  std::thread thread;
};

void Stream::serve() {
  std::unique_lock lock(mutex);
  for (;;) {
    while (queue.empty() && !stopping) changed.wait(lock);
    if (stopping) return;
    const Work work = std::move(queue.front());
    queue.pop_front();
    busy = true;
    lock.unlock();
    if (!is(kDeviceReset)) run(work);
    lock.lock();
    busy = false;
    if (queue.empty()) changed.notify_all();
  }
}

void Stream::run(const Work& work) {
  Node node = work.node;
  if (node.parameters != nullptr) {
    node.kind = node.parameters->operation == kWait64 ? Node::Kind::Wait : Node::Kind::Write;
    node.to = node.parameters->address;
    node.value = node.parameters->value;
  }
  switch (node.kind) {
    case Node::Kind::Copy: copy(work); break;
    case Node::Kind::Write:
      if (!is(kWriteLost) || ++writes % 50 != 0) store(node.to, node.value);
      break;
    case Node::Kind::Wait:
      while (!abandoned() && !is(kWaitPasses) &&
             (is(kWaitNeverEnds) || static_cast<std::int64_t>(load(node.to) - node.value) < 0)) {
        std::this_thread::sleep_for(std::chrono::microseconds(5));
      }
      break;
    case Node::Kind::Call:
      if (!is(kCallbackNeverRuns)) node.function(node.argument);
      break;
    case Node::Kind::Nothing: break;
  }
}

void Stream::copy(const Work& work) {
  const void* from = work.node.from;
  if (work.of != nullptr) {
    const auto& nodes = work.of->nodes;
    if (is(kStaleAfter200) && work.index >= 200) {
      for (std::size_t i = work.index - 200; i < 200; ++i) {
        if (nodes[i].kind != Node::Kind::Copy || nodes[i].bytes != work.node.bytes) continue;
        from = nodes[i].from;
        break;
      }
    }
    if (is(kIgnoresChangedMemory)) {
      auto& first = work.of->first_read[work.index];
      if (first.empty()) {
        const auto* bytes = static_cast<const std::byte*>(from);
        first.assign(bytes, bytes + work.node.bytes);
      }
      from = first.data();
    }
  }
  std::memmove(work.node.to, from, work.node.bytes);
}

namespace {

Stream* resolve(Stream* stream) {
  if (stream != nullptr) return stream;
  static Stream* const its_default = [] {
    Stream* made = new Stream;
    const std::lock_guard lock(streams_mutex);
    streams.insert(made);
    return made;
  }();
  return its_default;
}

int drain(Stream* stream) {
  std::unique_lock lock(stream->mutex);
  while ((!stream->queue.empty() || stream->busy) && !is(kDeviceReset)) {
    stream->changed.wait_for(lock, std::chrono::milliseconds(5));
  }
  return gone();
}

void enqueue(Stream* stream, Work work) {
  const std::lock_guard lock(stream->mutex);
  stream->queue.push_back(std::move(work));
  stream->changed.notify_all();
}

}  // namespace

bool is(Fault fault) { return (faults.load(std::memory_order_relaxed) & fault) != 0; }
int gone() { return is(kDeviceReset) ? kContextDestroyed : kSuccess; }

int stream_create(Stream** stream) {
  if (gone() != 0) return gone();
  *stream = new Stream;
  const std::lock_guard lock(streams_mutex);
  streams.insert(*stream);
  return kSuccess;
}

int stream_destroy(Stream* stream) {   // works after a reset too: the threads must end
  {
    const std::lock_guard lock(streams_mutex);
    if (streams.erase(stream) == 0) return kInvalidValue;
  }
  if (stream->graph != nullptr) --capturing_streams;
  if (!is(kDeviceReset)) drain(stream);
  delete stream;
  return gone();
}

int stream_synchronize(Stream* stream) {
  if (gone() != 0) return gone();
  stream = resolve(stream);
  if (stream->graph != nullptr) {
    stream->invalid = true;
    return kCaptureUnsupported;
  }
  return drain(stream);
}

int synchronize_all() {
  if (gone() != 0) return gone();
  std::vector<Stream*> all;
  {
    const std::lock_guard lock(streams_mutex);
    all.assign(streams.begin(), streams.end());
  }
  for (Stream* stream : all) drain(stream);
  return gone();
}

int stream_query(Stream* stream) {
  if (gone() != 0) return gone();
  stream = resolve(stream);
  const std::lock_guard lock(stream->mutex);
  return stream->queue.empty() && !stream->busy ? kSuccess : kNotReady;
}

int stream_is_capturing(Stream* stream, int* status) {
  if (gone() != 0) return gone();
  *status = resolve(stream)->graph != nullptr ? 1 : 0;
  return kSuccess;
}

int put(Stream* stream, Node node) {
  if (gone() != 0) return gone();
  stream = resolve(stream);
  if (stream->graph == nullptr) return run_now(stream, std::move(node));
  Graph& graph = *stream->graph;
  node.before = graph.last;
  graph.nodes.push_back(std::make_unique<Node>(std::move(node)));
  graph.last = {graph.nodes.back().get()};
  return kSuccess;
}

int run_now(Stream* stream, Node node) {
  if (gone() != 0) return gone();
  enqueue(resolve(stream), {std::move(node)});
  return kSuccess;
}

int memory_operation(Stream* stream, Node::Kind kind, void* word, std::uint64_t value) {
  if (gone() != 0) return gone();
  if (is(kUnsupported) || is(kOperationFails)) return kNotSupported;
  Node node{.kind = kind, .to = word, .value = value};
  if (is(kRunsAtCapture)) return run_now(stream, std::move(node));
  return put(stream, std::move(node));
}

int begin_capture(Stream* stream) {
  if (gone() != 0) return gone();
  if (stream == nullptr || stream->graph != nullptr) return kInvalidValue;
  stream->graph = std::make_unique<Graph>();
  stream->invalid = false;
  ++capturing_streams;
  return kSuccess;
}

int end_capture(Stream* stream, Graph** graph) {
  if (gone() != 0) return gone();
  stream = resolve(stream);
  if (stream->graph == nullptr) return kInvalidValue;
  --capturing_streams;
  const std::unique_ptr<Graph> captured = std::move(stream->graph);
  if (stream->invalid) return kCaptureInvalidated;
  *graph = new Graph(std::move(*captured));
  return kSuccess;
}

Graph* captured(Stream* stream) { return resolve(stream)->graph.get(); }

Stream* capturing_into(const Graph* graph) {
  const std::lock_guard lock(streams_mutex);
  for (Stream* stream : streams) {
    if (stream->graph.get() == graph) return stream;
  }
  return nullptr;
}

// An order that the dependencies allow, and beyond that the latest node first: who forgets one, sees it.
int instantiate(Graph* graph, Executable** executable) {
  if (gone() != 0) return gone();
  std::map<const Node*, std::size_t> missing;
  std::map<const Node*, std::vector<const Node*>> after;
  std::vector<const Node*> free;
  for (const auto& node : graph->nodes) {
    missing[node.get()] = node->before.size();
    for (const Node* before : node->before) after[before].push_back(node.get());
    if (node->before.empty()) free.push_back(node.get());
  }
  const auto recording = std::make_shared<Recording>();
  auto& nodes = recording->nodes;
  while (!free.empty()) {
    const Node* node = free.back();
    free.pop_back();
    nodes.push_back(*node);
    for (const Node* next : after[node]) {
      if (--missing[next] == 0) free.push_back(next);
    }
  }
  recording->first_read.resize(nodes.size());
  *executable = new Executable{recording};
  return nodes.size() == graph->nodes.size() ? kSuccess : kInvalidValue;
}

int launch(Executable* executable, Stream* stream) {
  if (gone() != 0) return gone();
  const auto& recording = executable->recording;
  stream = resolve(stream);
  for (std::size_t i = 0; i < recording->nodes.size(); ++i) enqueue(stream, {recording->nodes[i], recording, i});
  return kSuccess;
}

int allocate(void** memory, std::size_t bytes) {
  if (gone() != 0) return gone();
  if (capturing_streams > 0) return kCaptureUnsupported;
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *memory != nullptr ? kSuccess : 2;
}

int release(void* memory) {   // the process's memory is freed, whatever becomes of the device
  std::free(memory);
  return gone();
}

const char* error_name(int code) {
  switch (code) {
    case kInvalidValue: return "FAKE_INVALID_VALUE";
    case kNotReady: return "FAKE_NOT_READY";
    case kContextDestroyed: return "FAKE_CONTEXT_IS_DESTROYED";
    case kNotSupported: return "FAKE_NOT_SUPPORTED";
    case kCaptureUnsupported: return "FAKE_CAPTURE_UNSUPPORTED";
    case kCaptureInvalidated: return "FAKE_CAPTURE_INVALIDATED";
    default: return "FAKE_UNKNOWN";
  }
}

const char* error_text(int code) { return code == kContextDestroyed ? "the device was reset" : "a fake driver's error"; }

}  // namespace fake

FAKE_API void fake_set_fault(int faults) { fake::faults.store(faults, std::memory_order_relaxed); }
