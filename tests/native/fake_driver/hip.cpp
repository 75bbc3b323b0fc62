// libamdhip64.so's names over the fake device. As in ROCm until mid 2026, hipStreamWriteValue64 and
// hipStreamWaitValue64 run at once on a stream that is captured: only explicit nodes are recorded.
#include <cstdlib>

#include "device.h"

using fake::Executable;
using fake::Graph;
using fake::Node;
using fake::Stream;

namespace {

thread_local int device = 0;
int context;

struct NodeParameters {
  void* context;
  std::uint32_t count;
  fake::Parameters* operations;
  std::uint32_t flags;
};

int run_now(Stream* stream, Node::Kind kind, void* word, std::uint64_t value) {
  if (fake::captured(stream) == nullptr) return fake::memory_operation(stream, kind, word, value);
  return fake::run_now(stream, Node{.kind = kind, .to = word, .value = value});
}

}  // namespace

FAKE_API int hipInit(unsigned) { return fake::gone(); }
FAKE_API const char* hipGetErrorName(int code) { return fake::error_name(code); }
FAKE_API const char* hipGetErrorString(int code) { return fake::error_text(code); }
FAKE_API int hipGetDevice(int* out) { return *out = device, fake::gone(); }
FAKE_API int hipSetDevice(int wanted) { return device = wanted, fake::gone(); }
FAKE_API int hipDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 10013 && !fake::is(fake::kUnsupported);
  return fake::gone();
}
FAKE_API int hipDeviceSynchronize() { return fake::synchronize_all(); }
FAKE_API int hipCtxGetCurrent(void** out) { return *out = &context, fake::gone(); }
FAKE_API int hipStreamCreateWithFlags(Stream** stream, unsigned) { return fake::stream_create(stream); }
FAKE_API int hipStreamDestroy(Stream* stream) { return fake::stream_destroy(stream); }
FAKE_API int hipStreamSynchronize(Stream* stream) { return fake::stream_synchronize(stream); }
FAKE_API int hipStreamQuery(Stream* stream) { return fake::stream_query(stream); }
FAKE_API int hipStreamIsCapturing(Stream* stream, int* status) { return fake::stream_is_capturing(stream, status); }
FAKE_API int hipStreamBeginCapture(Stream* stream, int) { return fake::begin_capture(stream); }
FAKE_API int hipStreamEndCapture(Stream* stream, Graph** graph) { return fake::end_capture(stream, graph); }
FAKE_API int hipStreamGetCaptureInfo_v2(Stream* stream, int* status, unsigned long long* id, Graph** graph,
                                        Node* const** before, std::size_t* count) {
  Graph* captured = fake::captured(stream);
  *status = captured != nullptr ? 1 : 0;
  if (captured == nullptr) return fake::gone();
  *id = 1;
  *graph = captured;
  *before = captured->last.data();
  *count = captured->last.size();
  return fake::gone();
}
FAKE_API int hipStreamUpdateCaptureDependencies(Stream* stream, Node** nodes, std::size_t count, unsigned flags) {
  Graph* captured = fake::captured(stream);
  if (captured == nullptr) return fake::kInvalidValue;
  if (flags == 1) captured->last.clear();
  captured->last.insert(captured->last.end(), nodes, nodes + count);
  return fake::gone();
}
FAKE_API int hipGraphAddBatchMemOpNode(Node** node, Graph* graph, Node* const* before, std::size_t count,
                                       const NodeParameters* given) {
  if (fake::gone() != 0) return fake::gone();
  if (fake::is(fake::kUnsupported) || fake::is(fake::kOperationFails)) return fake::kNotSupported;
  if (graph == nullptr || given == nullptr || given->context == nullptr || given->count != 1) return fake::kInvalidValue;
  const fake::Parameters& operation = *given->operations;
  if (operation.operation != fake::kWait64 && operation.operation != fake::kWrite64) return fake::kInvalidValue;
  auto made = std::make_unique<Node>(
      Node{.kind = operation.operation == fake::kWait64 ? Node::Kind::Wait : Node::Kind::Write,
           .to = operation.address,
           .value = operation.value});
  if (fake::is(fake::kShallowParameters)) made->parameters = &operation;
  if (fake::is(fake::kRunsAtCapture)) {
    fake::run_now(fake::capturing_into(graph), *made);
    made->kind = Node::Kind::Nothing;
  }
  made->before.assign(before, before + count);
  *node = made.get();
  graph->nodes.push_back(std::move(made));
  return fake::kSuccess;
}
FAKE_API int hipGraphInstantiate(Executable** executable, Graph* graph, Node**, char*, std::size_t) {
  return fake::instantiate(graph, executable);
}
FAKE_API int hipGraphLaunch(Executable* executable, Stream* stream) { return fake::launch(executable, stream); }
FAKE_API int hipGraphDestroy(Graph* graph) { return delete graph, fake::gone(); }
FAKE_API int hipGraphExecDestroy(Executable* executable) { return delete executable, fake::gone(); }
FAKE_API int hipMalloc(void** memory, std::size_t bytes) { return fake::allocate(memory, bytes); }
FAKE_API int hipExtMallocWithFlags(void** memory, std::size_t bytes, unsigned flags) {
  if (flags != 2 || bytes != 8) return fake::kInvalidValue;
  return fake::allocate(memory, bytes);
}
FAKE_API int hipFree(void* memory) { return fake::release(memory); }
FAKE_API int hipHostMalloc(void** memory, std::size_t bytes, unsigned) { return fake::allocate(memory, bytes); }
FAKE_API int hipHostFree(void* memory) { return fake::release(memory); }
FAKE_API int hipMemcpyAsync(void* to, const void* from, std::size_t bytes, int, Stream* stream) {
  return fake::put(stream, Node{.kind = Node::Kind::Copy, .to = to, .from = from, .bytes = bytes});
}
FAKE_API int hipLaunchHostFunc(Stream* stream, void (*function)(void*), void* argument) {
  if (fake::is(fake::kCallbackFails)) return fake::kNotSupported;
  return fake::put(stream, Node{.kind = Node::Kind::Call, .function = function, .argument = argument});
}
FAKE_API int hipStreamWriteValue64(Stream* stream, void* word, std::uint64_t value, unsigned) {
  return run_now(stream, Node::Kind::Write, word, value);
}
FAKE_API int hipStreamWaitValue64(Stream* stream, void* word, std::uint64_t value, unsigned, std::uint64_t) {
  return run_now(stream, Node::Kind::Wait, word, value);
}
