#include "handshake/driver.h"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>

#include "handshake/library.h"

namespace ft::handshake {
namespace {

struct Wanted {
  std::string name, found;
};

int look_at(dl_phdr_info* info, std::size_t, void* argument) {
  auto& wanted = *static_cast<Wanted*>(argument);
  const std::string file = std::filesystem::path(info->dlpi_name).filename().string();
  if (!file.starts_with(wanted.name)) return 0;
  wanted.found = info->dlpi_name;
  return 1;
}

// torch brings a HIP library of its own; a second copy of it beside that one would know none of its streams.
std::string loaded_library(const char* name) {
  Wanted wanted{name, {}};
  dl_iterate_phdr(look_at, &wanted);
  return wanted.found;
}

}  // namespace

Library::Library(const std::string& path, const char* name) : path_(path) {
  if (path_.empty()) path_ = loaded_library(name);
  if (path_.empty()) path_ = name;
  handle_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) {
    const char* reason = dlerror();
    throw DriverError("cannot open the GPU driver's library " + path_ + ": " +
                          (reason != nullptr ? reason : "no reason given") +
                          "; install the vendor's driver, or run without a GPU",
                      -1);
  }
}

void* Library::symbol(const char* name) const { return dlsym(handle_, name); }

void Library::missing(const char* name) const {
  throw DriverError(path_ + " has no " + name + "; a newer driver has it", -1);
}

std::shared_ptr<Driver> Driver::open(Vendor vendor, const std::string& path, int device) {
  return vendor == Vendor::Cuda ? open_cuda(path, device) : open_hip(path, device);
}

}  // namespace ft::handshake
