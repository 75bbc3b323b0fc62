// libcuda.so.1's names over the fake device.
#include "device.h"

using fake::Executable;
using fake::Graph;
using fake::Node;
using fake::Stream;
using DevicePointer = std::uint64_t;

namespace {

thread_local void* current = nullptr;
int context;   // its address is the primary context's handle

}  // namespace

FAKE_API int cuInit(unsigned) { return fake::gone(); }
FAKE_API int cuGetErrorName(int code, const char** name) { return *name = fake::error_name(code), 0; }
FAKE_API int cuGetErrorString(int code, const char** text) { return *text = fake::error_text(code), 0; }
FAKE_API int cuDeviceGet(int* device, int index) { return *device = index, fake::gone(); }
FAKE_API int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 122 && !fake::is(fake::kUnsupported);
  return fake::gone();
}
FAKE_API int cuDevicePrimaryCtxRetain(void** out, int) { return *out = &context, fake::gone(); }
FAKE_API int cuDevicePrimaryCtxRelease_v2(int) { return fake::gone(); }
FAKE_API int cuCtxGetCurrent(void** out) { return *out = current, fake::gone(); }
FAKE_API int cuCtxSetCurrent(void* wanted) { return current = wanted, fake::gone(); }
FAKE_API int cuCtxSynchronize() { return fake::synchronize_all(); }
FAKE_API int cuStreamCreate(Stream** stream, unsigned) { return fake::stream_create(stream); }
FAKE_API int cuStreamDestroy_v2(Stream* stream) { return fake::stream_destroy(stream); }
FAKE_API int cuStreamSynchronize(Stream* stream) { return fake::stream_synchronize(stream); }
FAKE_API int cuStreamQuery(Stream* stream) { return fake::stream_query(stream); }
FAKE_API int cuStreamIsCapturing(Stream* stream, int* status) { return fake::stream_is_capturing(stream, status); }
FAKE_API int cuStreamBeginCapture_v2(Stream* stream, int) { return fake::begin_capture(stream); }
FAKE_API int cuStreamEndCapture(Stream* stream, Graph** graph) { return fake::end_capture(stream, graph); }
FAKE_API int cuGraphInstantiateWithFlags(Executable** executable, Graph* graph, unsigned long long) {
  return fake::instantiate(graph, executable);
}
FAKE_API int cuGraphLaunch(Executable* executable, Stream* stream) { return fake::launch(executable, stream); }
FAKE_API int cuGraphDestroy(Graph* graph) { return delete graph, fake::gone(); }
FAKE_API int cuGraphExecDestroy(Executable* executable) { return delete executable, fake::gone(); }
FAKE_API int cuMemAlloc_v2(DevicePointer* memory, std::size_t bytes) {
  return fake::allocate(reinterpret_cast<void**>(memory), bytes);
}
FAKE_API int cuMemFree_v2(DevicePointer memory) { return fake::release(reinterpret_cast<void*>(memory)); }
FAKE_API int cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) { return fake::allocate(memory, bytes); }
FAKE_API int cuMemFreeHost(void* memory) { return fake::release(memory); }
FAKE_API int cuMemHostGetDevicePointer_v2(DevicePointer* device, void* host, unsigned) {
  return *device = reinterpret_cast<DevicePointer>(host), fake::gone();
}
FAKE_API int cuMemcpyAsync(DevicePointer to, DevicePointer from, std::size_t bytes, Stream* stream) {
  return fake::put(stream, Node{.kind = Node::Kind::Copy,
                                .to = reinterpret_cast<void*>(to),
                                .from = reinterpret_cast<const void*>(from),
                                .bytes = bytes});
}
FAKE_API int cuLaunchHostFunc(Stream* stream, void (*function)(void*), void* argument) {
  if (fake::is(fake::kCallbackFails)) return fake::kNotSupported;
  return fake::put(stream, Node{.kind = Node::Kind::Call, .function = function, .argument = argument});
}
FAKE_API int cuStreamWriteValue64_v2(Stream* stream, DevicePointer word, std::uint64_t value, unsigned) {
  return fake::memory_operation(stream, Node::Kind::Write, reinterpret_cast<void*>(word), value);
}
FAKE_API int cuStreamWaitValue64_v2(Stream* stream, DevicePointer word, std::uint64_t value, unsigned) {
  return fake::memory_operation(stream, Node::Kind::Wait, reinterpret_cast<void*>(word), value);
}
