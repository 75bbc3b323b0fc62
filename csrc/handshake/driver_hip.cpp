// ROCm's HIP library. Types and numbers are those of its public documentation.
#include <deque>
#include <mutex>

#include "handshake/library.h"

namespace ft::handshake {
namespace {

using Result = int;
using Node = void*;

constexpr Result kNotReady = 600;
constexpr int kCanUseStreamWaitValue = 10013;   // a device attribute
constexpr unsigned kNonBlocking = 1;            // of hipStreamCreateWithFlags
constexpr unsigned kPortable = 1, kMapped = 2;  // of hipHostMalloc
constexpr unsigned kSignalMemory = 2;           // of hipExtMallocWithFlags: the only memory that waits are for
constexpr int kThreadLocal = 1;                 // capture mode
constexpr int kCopyDefault = 4;                 // hipMemcpyKind: the addresses tell
constexpr int kCaptureActive = 1;
constexpr unsigned kSetDependencies = 1;        // of hipStreamUpdateCaptureDependencies
constexpr unsigned kWaitAtLeast = 0;
constexpr std::uint64_t kAllBits = ~std::uint64_t{0};

// hipStreamBatchMemOpParams, of which a wait and a write have the same layout.
struct OperationParameters {
  std::uint32_t operation;
  void* address;
  std::uint64_t value;
  std::uint32_t flags;
  void* alias;
  std::uint64_t unused;
};
static_assert(sizeof(OperationParameters) == 48);
constexpr std::uint32_t kWait64 = 4, kWrite64 = 5;

struct NodeParameters {   // hipBatchMemOpNodeParams
  void* context;
  std::uint32_t count;
  OperationParameters* operations;
  std::uint32_t flags;
};

class HipDriver final : public Driver {
 public:
  HipDriver(const std::string& path, int device);

  Vendor vendor() const override { return Vendor::Rocm; }
  void make_current() override {
    int current = -1;
    check(get_device_(&current), "hipGetDevice");
    if (current != device_) check(set_device_(device_), "hipSetDevice");
  }

  Stream create_stream() override {
    Stream stream = nullptr;
    check(stream_create_(&stream, kNonBlocking), "hipStreamCreateWithFlags");
    return stream;
  }
  void destroy_stream(Stream stream) override { check(stream_destroy_(stream), "hipStreamDestroy"); }
  void synchronize(Stream stream) override { check(stream_synchronize_(stream), "hipStreamSynchronize"); }
  void synchronize_all() override { check(device_synchronize_(), "hipDeviceSynchronize"); }
  bool finished(Stream stream) override {
    const Result result = stream_query_(stream);
    if (result != kNotReady) check(result, "hipStreamQuery");
    return result != kNotReady;
  }
  bool capturing(Stream stream) override {
    int status = 0;
    check(stream_is_capturing_(stream, &status), "hipStreamIsCapturing");
    return status != 0;
  }

  void begin_capture(Stream stream) override { check(begin_capture_(stream, kThreadLocal), "hipStreamBeginCapture"); }
  Graph end_capture(Stream stream) override {
    Graph graph = nullptr;
    check(end_capture_(stream, &graph), "hipStreamEndCapture");
    return graph;
  }
  Executable instantiate(Graph graph) override {
    Executable executable = nullptr;
    check(instantiate_(&executable, graph, nullptr, nullptr, 0), "hipGraphInstantiate");
    return executable;
  }
  void launch(Executable executable, Stream stream) override {
    check(graph_launch_(executable, stream), "hipGraphLaunch");
  }
  void destroy_graph(Graph graph) override { check(graph_destroy_(graph), "hipGraphDestroy"); }
  void destroy_executable(Executable executable) override {
    check(executable_destroy_(executable), "hipGraphExecDestroy");
  }

  void* allocate_device(std::size_t bytes) override {
    void* memory = nullptr;
    check(memory_allocate_(&memory, bytes), "hipMalloc");
    return memory;
  }
  void free_device(void* memory) override { check(memory_free_(memory), "hipFree"); }
  void* allocate_pinned(std::size_t bytes) override {
    void* memory = nullptr;
    check(host_allocate_(&memory, bytes, kPortable | kMapped), "hipHostMalloc");
    return memory;
  }
  void free_pinned(void* memory) override { check(host_free_(memory), "hipHostFree"); }
  void copy_async(void* to, const void* from, std::size_t bytes, Stream stream) override {
    check(copy_(to, from, bytes, kCopyDefault, stream), "hipMemcpyAsync");
  }
  void call_host(Stream stream, void (*function)(void*), void* argument) override {
    check(launch_host_(stream, function, argument), "hipLaunchHostFunc");
  }

  std::string no_memory_operations() override;
  const char* memory_operations_name() const override { return "ROCm memory-operation nodes"; }
  FlagBlock allocate_flags() override {
    void* memory = nullptr;
    check(signal_allocate_(&memory, sizeof(std::uint64_t), kSignalMemory), "hipExtMallocWithFlags");
    return {memory, memory, 1, sizeof(std::uint64_t)};
  }
  void free_flags(const FlagBlock& block) override { free_device(block.host); }
  void write_value(Stream stream, void* word, std::uint64_t value) override {
    if (record(stream, kWrite64, word, value)) return;
    check(write_value_(stream, word, value, 0), "hipStreamWriteValue64");
  }
  void wait_value(Stream stream, void* word, std::uint64_t at_least) override {
    if (record(stream, kWait64, word, at_least)) return;
    check(wait_value_(stream, word, at_least, kWaitAtLeast, kAllBits), "hipStreamWaitValue64");
  }

 private:
  bool record(Stream stream, std::uint32_t operation, void* word, std::uint64_t value);
  void check(Result result, const char* call) const {
    if (result == 0) return;
    throw DriverError(
        std::string("ROCm: ") + call + " failed: " + error_name_(result) + " (" + error_text_(result) + ")", result);
  }

  Library library_;
  const int device_;
  std::mutex mutex_;
  // Before mid 2026 a graph kept the address of a node's parameters, and read them when it was replayed.
  std::deque<OperationParameters> recorded_;

  Result (*init_)(unsigned);
  const char* (*error_name_)(Result);
  const char* (*error_text_)(Result);
  Result (*get_device_)(int*);
  Result (*set_device_)(int);
  Result (*device_attribute_)(int*, int, int);
  Result (*device_synchronize_)();
  Result (*context_get_)(void**);
  Result (*stream_create_)(Stream*, unsigned);
  Result (*stream_destroy_)(Stream);
  Result (*stream_synchronize_)(Stream);
  Result (*stream_query_)(Stream);
  Result (*stream_is_capturing_)(Stream, int*);
  Result (*begin_capture_)(Stream, int);
  Result (*end_capture_)(Stream, Graph*);
  Result (*capture_info_)(Stream, int*, unsigned long long*, Graph*, const Node**, std::size_t*);
  Result (*capture_dependencies_)(Stream, Node*, std::size_t, unsigned);
  Result (*add_operation_node_)(Node*, Graph, const Node*, std::size_t, const NodeParameters*);
  Result (*instantiate_)(Executable*, Graph, Node*, char*, std::size_t);
  Result (*graph_launch_)(Executable, Stream);
  Result (*graph_destroy_)(Graph);
  Result (*executable_destroy_)(Executable);
  Result (*memory_allocate_)(void**, std::size_t);
  Result (*signal_allocate_)(void**, std::size_t, unsigned);
  Result (*memory_free_)(void*);
  Result (*host_allocate_)(void**, std::size_t, unsigned);
  Result (*host_free_)(void*);
  Result (*copy_)(void*, const void*, std::size_t, int, Stream);
  Result (*launch_host_)(Stream, void (*)(void*), void*);
  Result (*write_value_)(Stream, void*, std::uint64_t, unsigned);
  Result (*wait_value_)(Stream, void*, std::uint64_t, unsigned, std::uint64_t);
};

HipDriver::HipDriver(const std::string& path, int device) : library_(path, "libamdhip64.so"), device_(device) {
  library_.require(init_, "hipInit");
  library_.require(error_name_, "hipGetErrorName");
  library_.require(error_text_, "hipGetErrorString");
  library_.require(get_device_, "hipGetDevice");
  library_.require(set_device_, "hipSetDevice");
  library_.require(device_attribute_, "hipDeviceGetAttribute");
  library_.require(device_synchronize_, "hipDeviceSynchronize");
  library_.require(stream_create_, "hipStreamCreateWithFlags");
  library_.require(stream_destroy_, "hipStreamDestroy");
  library_.require(stream_synchronize_, "hipStreamSynchronize");
  library_.require(stream_query_, "hipStreamQuery");
  library_.require(stream_is_capturing_, "hipStreamIsCapturing");
  library_.require(begin_capture_, "hipStreamBeginCapture");
  library_.require(end_capture_, "hipStreamEndCapture");
  library_.require(instantiate_, "hipGraphInstantiate");
  library_.require(graph_launch_, "hipGraphLaunch");
  library_.require(graph_destroy_, "hipGraphDestroy");
  library_.require(executable_destroy_, "hipGraphExecDestroy");
  library_.require(memory_allocate_, "hipMalloc");
  library_.require(memory_free_, "hipFree");
  library_.require(host_allocate_, "hipHostMalloc");
  library_.require(host_free_, "hipHostFree");
  library_.require(copy_, "hipMemcpyAsync");
  library_.require(launch_host_, "hipLaunchHostFunc");
  library_.find(context_get_, "hipCtxGetCurrent");
  library_.find(signal_allocate_, "hipExtMallocWithFlags");
  library_.find(write_value_, "hipStreamWriteValue64");
  library_.find(wait_value_, "hipStreamWaitValue64");
  library_.find(capture_info_, "hipStreamGetCaptureInfo_v2");
  library_.find(capture_dependencies_, "hipStreamUpdateCaptureDependencies");
  library_.find(add_operation_node_, "hipGraphAddBatchMemOpNode");

  check(init_(0), "hipInit");
  make_current();
}

std::string HipDriver::no_memory_operations() {
  if (signal_allocate_ == nullptr || write_value_ == nullptr || wait_value_ == nullptr) {
    return library_.path() + " has no signal memory, hipStreamWriteValue64 and hipStreamWaitValue64";
  }
  int can = 0;
  check(device_attribute_(&can, kCanUseStreamWaitValue, device_), "hipDeviceGetAttribute");
  if (can != 0) return {};
  return "the driver says that this device cannot wait for values (hipDeviceAttributeCanUseStreamWaitValue is 0)";
}

// Adds a node with this one operation to the graph that the stream is being captured into, after what was
// captured so far. Until mid 2026 capture did not record these calls but ran them at once, and the
// operations of one node ran in parallel. False: the stream is not capturing.
bool HipDriver::record(Stream stream, std::uint32_t operation, void* word, std::uint64_t value) {
  if (!capturing(stream)) return false;
  if (capture_info_ == nullptr || capture_dependencies_ == nullptr || add_operation_node_ == nullptr) {
    throw DriverError(library_.path() + " has no hipGraphAddBatchMemOpNode: ROCm 6.4 or newer has it", -1);
  }
  int status = 0;
  unsigned long long id = 0;
  Graph graph = nullptr;
  const Node* before = nullptr;
  std::size_t count = 0;
  check(capture_info_(stream, &status, &id, &graph, &before, &count), "hipStreamGetCaptureInfo_v2");
  if (status != kCaptureActive) throw DriverError("ROCm: this stream's capture has become invalid", -1);
  NodeParameters parameters{nullptr, 1, nullptr, 0};
  if (context_get_ != nullptr) check(context_get_(&parameters.context), "hipCtxGetCurrent");
  {
    const std::lock_guard lock(mutex_);
    recorded_.push_back({operation, word, value, 0, nullptr, 0});
    parameters.operations = &recorded_.back();
  }
  Node node = nullptr;
  check(add_operation_node_(&node, graph, before, count, &parameters), "hipGraphAddBatchMemOpNode");
  check(capture_dependencies_(stream, &node, 1, kSetDependencies), "hipStreamUpdateCaptureDependencies");
  return true;
}

}  // namespace

std::shared_ptr<Driver> open_hip(const std::string& path, int device) {
  return std::make_shared<HipDriver>(path, device);
}

}  // namespace ft::handshake
