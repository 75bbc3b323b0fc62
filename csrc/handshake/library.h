// A shared library and its entry points, and one class per vendor made of them.
#pragma once

#include <memory>
#include <string>

#include "handshake/driver.h"

namespace ft::handshake {

class Library {
 public:
  // `path`, or if it is empty the loaded or installed library whose file name begins with `name`.
  Library(const std::string& path, const char* name);
  // Stays open: the vendors' libraries do not survive being unloaded, and others use them too.
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const std::string& path() const { return path_; }
  template <class Function>
  void find(Function*& function, const char* name) const {   // null if it is not there
    function = reinterpret_cast<Function*>(symbol(name));
  }
  template <class Function>
  void require(Function*& function, const char* name) const {
    find(function, name);
    if (function == nullptr) missing(name);
  }

 private:
  void* symbol(const char* name) const;
  [[noreturn]] void missing(const char* name) const;

  std::string path_;
  void* handle_;
};

std::shared_ptr<Driver> open_cuda(const std::string& path, int device);
std::shared_ptr<Driver> open_hip(const std::string& path, int device);

}  // namespace ft::handshake
