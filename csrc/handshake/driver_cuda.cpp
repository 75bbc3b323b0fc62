// CUDA's driver library. Types and numbers are those of its public documentation.
#include "handshake/library.h"

namespace ft::handshake {
namespace {

using Result = int;
using DevicePointer = std::uint64_t;

constexpr Result kNotReady = 600;
constexpr int kHas64BitMemoryOperations = 122;   // of the second version; 93, of the first, may well be 0
constexpr unsigned kPortable = 1, kMapped = 2;   // of cuMemHostAlloc
constexpr unsigned kNonBlocking = 1;             // of cuStreamCreate
constexpr int kThreadLocal = 1;                  // capture mode: other threads' calls are their own affair
constexpr unsigned kWriteAfterFence = 0, kWaitAtLeast = 0;   // the default flags
constexpr std::size_t kFlagStride = 64;
constexpr int kFlagsPerBlock = 64;

class CudaDriver final : public Driver {
 public:
  CudaDriver(const std::string& path, int device);
  ~CudaDriver() override { primary_release_(device_); }

  Vendor vendor() const override { return Vendor::Cuda; }
  void make_current() override {
    void* current = nullptr;
    check(context_get_(&current), "cuCtxGetCurrent");
    if (current != context_) check(context_set_(context_), "cuCtxSetCurrent");
  }

  Stream create_stream() override {
    Stream stream = nullptr;
    check(stream_create_(&stream, kNonBlocking), "cuStreamCreate");
    return stream;
  }
  void destroy_stream(Stream stream) override { check(stream_destroy_(stream), "cuStreamDestroy"); }
  void synchronize(Stream stream) override { check(stream_synchronize_(stream), "cuStreamSynchronize"); }
  void synchronize_all() override { check(context_synchronize_(), "cuCtxSynchronize"); }
  bool finished(Stream stream) override {
    const Result result = stream_query_(stream);
    if (result != kNotReady) check(result, "cuStreamQuery");
    return result != kNotReady;
  }
  bool capturing(Stream stream) override {
    int status = 0;
    check(stream_is_capturing_(stream, &status), "cuStreamIsCapturing");
    return status != 0;
  }

  void begin_capture(Stream stream) override { check(begin_capture_(stream, kThreadLocal), "cuStreamBeginCapture"); }
  Graph end_capture(Stream stream) override {
    Graph graph = nullptr;
    check(end_capture_(stream, &graph), "cuStreamEndCapture");
    return graph;
  }
  Executable instantiate(Graph graph) override {
    Executable executable = nullptr;
    check(instantiate_(&executable, graph, 0), "cuGraphInstantiateWithFlags");
    return executable;
  }
  void launch(Executable executable, Stream stream) override {
    check(graph_launch_(executable, stream), "cuGraphLaunch");
  }
  void destroy_graph(Graph graph) override { check(graph_destroy_(graph), "cuGraphDestroy"); }
  void destroy_executable(Executable executable) override {
    check(executable_destroy_(executable), "cuGraphExecDestroy");
  }

  void* allocate_device(std::size_t bytes) override {
    DevicePointer memory = 0;
    check(memory_allocate_(&memory, bytes), "cuMemAlloc");
    return reinterpret_cast<void*>(memory);
  }
  void free_device(void* memory) override {
    check(memory_free_(reinterpret_cast<DevicePointer>(memory)), "cuMemFree");
  }
  void* allocate_pinned(std::size_t bytes) override {
    void* memory = nullptr;
    check(host_allocate_(&memory, bytes, kPortable | kMapped), "cuMemHostAlloc");
    return memory;
  }
  void free_pinned(void* memory) override { check(host_free_(memory), "cuMemFreeHost"); }
  void copy_async(void* to, const void* from, std::size_t bytes, Stream stream) override {
    check(copy_(reinterpret_cast<DevicePointer>(to), reinterpret_cast<DevicePointer>(from), bytes, stream),
          "cuMemcpyAsync");
  }
  void call_host(Stream stream, void (*function)(void*), void* argument) override {
    check(launch_host_(stream, function, argument), "cuLaunchHostFunc");
  }

  std::string no_memory_operations() override {
    if (write_value_ == nullptr || wait_value_ == nullptr) {
      return library_.path() + " has no cuStreamWriteValue64_v2 and cuStreamWaitValue64_v2: it is older than CUDA 11.7";
    }
    int has = 0;
    check(device_attribute_(&has, kHas64BitMemoryOperations, device_), "cuDeviceGetAttribute");
    if (has != 0) return {};
    return "the driver says that this device has no 64-bit stream memory operations (attribute 122 is 0)";
  }
  const char* memory_operations_name() const override { return "CUDA stream memory operations"; }
  FlagBlock allocate_flags() override {
    void* host = allocate_pinned(kFlagStride * kFlagsPerBlock);
    DevicePointer device = 0;
    if (const Result result = host_device_pointer_(&device, host, 0); result != 0) {
      host_free_(host);
      check(result, "cuMemHostGetDevicePointer");
    }
    return {host, reinterpret_cast<void*>(device), kFlagsPerBlock, kFlagStride};
  }
  void free_flags(const FlagBlock& block) override { free_pinned(block.host); }
  void write_value(Stream stream, void* word, std::uint64_t value) override {
    check(write_value_(stream, reinterpret_cast<DevicePointer>(word), value, kWriteAfterFence),
          "cuStreamWriteValue64");
  }
  void wait_value(Stream stream, void* word, std::uint64_t at_least) override {
    check(wait_value_(stream, reinterpret_cast<DevicePointer>(word), at_least, kWaitAtLeast), "cuStreamWaitValue64");
  }

 private:
  void check(Result result, const char* call) const {
    if (result == 0) return;
    const char *name = nullptr, *text = nullptr;
    error_name_(result, &name);
    error_text_(result, &text);
    throw DriverError(std::string("CUDA: ") + call + " failed: " + (name != nullptr ? name : "unknown error") + " (" +
                          (text != nullptr ? text : "no description") + ")",
                      result);
  }

  Library library_;
  int device_ = 0;
  void* context_ = nullptr;

  Result (*init_)(unsigned);
  Result (*error_name_)(Result, const char**);
  Result (*error_text_)(Result, const char**);
  Result (*device_get_)(int*, int);
  Result (*device_attribute_)(int*, int, int);
  Result (*primary_retain_)(void**, int);
  Result (*primary_release_)(int);
  Result (*context_get_)(void**);
  Result (*context_set_)(void*);
  Result (*context_synchronize_)();
  Result (*stream_create_)(Stream*, unsigned);
  Result (*stream_destroy_)(Stream);
  Result (*stream_synchronize_)(Stream);
  Result (*stream_query_)(Stream);
  Result (*stream_is_capturing_)(Stream, int*);
  Result (*begin_capture_)(Stream, int);
  Result (*end_capture_)(Stream, Graph*);
  Result (*instantiate_)(Executable*, Graph, unsigned long long);
  Result (*graph_launch_)(Executable, Stream);
  Result (*graph_destroy_)(Graph);
  Result (*executable_destroy_)(Executable);
  Result (*memory_allocate_)(DevicePointer*, std::size_t);
  Result (*memory_free_)(DevicePointer);
  Result (*host_allocate_)(void**, std::size_t, unsigned);
  Result (*host_free_)(void*);
  Result (*host_device_pointer_)(DevicePointer*, void*, unsigned);
  Result (*copy_)(DevicePointer, DevicePointer, std::size_t, Stream);
  Result (*launch_host_)(Stream, void (*)(void*), void*);
  Result (*write_value_)(Stream, DevicePointer, std::uint64_t, unsigned);
  Result (*wait_value_)(Stream, DevicePointer, std::uint64_t, unsigned);
};

CudaDriver::CudaDriver(const std::string& path, int device) : library_(path, "libcuda.so.1") {
  library_.require(init_, "cuInit");
  library_.require(error_name_, "cuGetErrorName");
  library_.require(error_text_, "cuGetErrorString");
  library_.require(device_get_, "cuDeviceGet");
  library_.require(device_attribute_, "cuDeviceGetAttribute");
  library_.require(primary_retain_, "cuDevicePrimaryCtxRetain");
  library_.require(primary_release_, "cuDevicePrimaryCtxRelease_v2");
  library_.require(context_get_, "cuCtxGetCurrent");
  library_.require(context_set_, "cuCtxSetCurrent");
  library_.require(context_synchronize_, "cuCtxSynchronize");
  library_.require(stream_create_, "cuStreamCreate");
  library_.require(stream_destroy_, "cuStreamDestroy_v2");
  library_.require(stream_synchronize_, "cuStreamSynchronize");
  library_.require(stream_query_, "cuStreamQuery");
  library_.require(stream_is_capturing_, "cuStreamIsCapturing");
  library_.require(begin_capture_, "cuStreamBeginCapture_v2");
  library_.require(end_capture_, "cuStreamEndCapture");
  library_.require(instantiate_, "cuGraphInstantiateWithFlags");
  library_.require(graph_launch_, "cuGraphLaunch");
  library_.require(graph_destroy_, "cuGraphDestroy");
  library_.require(executable_destroy_, "cuGraphExecDestroy");
  library_.require(memory_allocate_, "cuMemAlloc_v2");
  library_.require(memory_free_, "cuMemFree_v2");
  library_.require(host_allocate_, "cuMemHostAlloc");
  library_.require(host_free_, "cuMemFreeHost");
  library_.require(host_device_pointer_, "cuMemHostGetDevicePointer_v2");
  library_.require(copy_, "cuMemcpyAsync");
  library_.require(launch_host_, "cuLaunchHostFunc");
  // The second version works without a kernel module switch. Who lacks it has other mechanisms.
  library_.find(write_value_, "cuStreamWriteValue64_v2");
  library_.find(wait_value_, "cuStreamWaitValue64_v2");

  check(init_(0), "cuInit");
  check(device_get_(&device_, device), "cuDeviceGet");
  check(primary_retain_(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    make_current();
  } catch (...) {   // whose destructor does not run
    primary_release_(device_);
    throw;
  }
}

}  // namespace

std::shared_ptr<Driver> open_cuda(const std::string& path, int device) {
  return std::make_shared<CudaDriver>(path, device);
}

}  // namespace ft::handshake
