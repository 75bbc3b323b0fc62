// A GPU driver, opened at run time: the few calls that a handshake and its probe need, the same for both
// vendors. Nothing here needs a vendor's header or a GPU at build time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace ft::handshake {

enum class Vendor : std::uint8_t { Cuda, Rocm };

using Stream = void*;       // the vendor's handle; null: its default stream
using Graph = void*;        // what was captured
using Executable = void*;   // an instantiated graph

// A call failed. The message has the call, and the driver's name and text of the error.
class DriverError : public std::runtime_error {
 public:
  DriverError(const std::string& what, int code) : std::runtime_error(what), code_(code) {}
  int code() const { return code_; }   // the driver's; -1: the library or an entry point is missing

 private:
  int code_;
};

// Memory for flags, seen by both sides. `count` words of 8 bytes, `stride` bytes apart.
struct FlagBlock {
  void* host;
  void* device;   // the same words as stream operations name them
  int count;
  std::size_t stride;
};

// Calls may come from any thread. Whatever fails throws DriverError.
class Driver {
 public:
  // `path`: the library to open; empty: the one that this process has loaded already, else the system's.
  static std::shared_ptr<Driver> open(Vendor vendor, const std::string& path = {}, int device = 0);
  virtual ~Driver() = default;

  virtual Vendor vendor() const = 0;
  virtual void make_current() = 0;   // the device, for the calling thread

  virtual Stream create_stream() = 0;
  virtual void destroy_stream(Stream stream) = 0;
  virtual void synchronize(Stream stream) = 0;
  virtual void synchronize_all() = 0;
  virtual bool finished(Stream stream) = 0;
  virtual bool capturing(Stream stream) = 0;

  virtual void begin_capture(Stream stream) = 0;
  virtual Graph end_capture(Stream stream) = 0;
  virtual Executable instantiate(Graph graph) = 0;
  virtual void launch(Executable executable, Stream stream) = 0;
  virtual void destroy_graph(Graph graph) = 0;
  virtual void destroy_executable(Executable executable) = 0;

  virtual void* allocate_device(std::size_t bytes) = 0;
  virtual void free_device(void* memory) = 0;
  virtual void* allocate_pinned(std::size_t bytes) = 0;
  virtual void free_pinned(void* memory) = 0;
  virtual void copy_async(void* to, const void* from, std::size_t bytes, Stream stream) = 0;
  virtual void call_host(Stream stream, void (*function)(void*), void* argument) = 0;

  // Why this driver or device has no stream memory operations; empty: it says that it has them.
  virtual std::string no_memory_operations() = 0;
  virtual const char* memory_operations_name() const = 0;
  virtual FlagBlock allocate_flags() = 0;   // as many as one allocation gives; not zeroed
  virtual void free_flags(const FlagBlock& block) = 0;
  // On a capturing stream these are recorded, with these operands.
  virtual void write_value(Stream stream, void* word, std::uint64_t value) = 0;
  virtual void wait_value(Stream stream, void* word, std::uint64_t at_least) = 0;
};

}  // namespace ft::handshake
