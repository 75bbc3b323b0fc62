// Typed views of torch tensors and NumPy arrays that a call was given. Borrowed: they live as long as
// the call. Every refusal names the argument.
//
// nanobind's own ndarray goes through Tensor.__dlpack__, Python code that takes 8 microseconds; a
// decode step makes a thousand such conversions. torch's C function table for the same exchange takes
// 0.1, so that is what is used, and the buffer protocol for NumPy.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace ft::py {

namespace nb = nanobind;

struct Array {   // any array, unchecked
  PyObject* object;
};

enum class Kind : std::uint8_t { Float32, Float64, Int32, Int64, UInt8, UInt64 };

template <class T>
constexpr Kind kind_of() {
  using U = std::remove_const_t<T>;
  if constexpr (std::is_same_v<U, float>) return Kind::Float32;
  else if constexpr (std::is_same_v<U, double>) return Kind::Float64;
  else if constexpr (std::is_same_v<U, std::int32_t>) return Kind::Int32;
  else if constexpr (std::is_same_v<U, std::int64_t>) return Kind::Int64;
  else if constexpr (std::is_same_v<U, std::uint8_t>) return Kind::UInt8;
  else {
    static_assert(std::is_same_v<U, std::uint64_t>);
    return Kind::UInt64;
  }
}

[[noreturn]] void refuse_array(const char* name, const std::string& found, const std::string& expected);   // ValueError

// A contiguous CPU array of up to four dimensions.
class RawView {
 public:
  static constexpr int kMaxDims = 4;
  static constexpr int kAnyDims = -1;

  // Raises TypeError unless it is such an array of that kind and number of dimensions.
  RawView(const char* name, Array array, Kind kind, int dims, bool writable);
  ~RawView();
  RawView(const RawView&) = delete;
  RawView& operator=(const RawView&) = delete;

  const char* name() const { return name_; }
  int dims() const { return dims_; }
  std::int64_t shape(int dim) const { return shape_[dim]; }
  std::int64_t size() const;
  // Raises ValueError unless the shape is this; a negative number stands for any.
  void expect(std::initializer_list<std::int64_t> shape) const;
  void expect_like(const RawView& other) const;
  [[noreturn]] void refuse(const std::string& found, const std::string& expected) const;   // ValueError

 protected:
  void* data_ = nullptr;

 private:
  void from_dlpack(const nb::dlpack::dltensor& tensor, Kind kind);
  void from_buffer(PyObject* object, Kind kind, bool writable);

  const char* name_;
  Py_buffer buffer_{};
  int dims_ = 0;
  std::int64_t shape_[kMaxDims]{};
};

// T const: may be read-only. N: number of dimensions.
template <class T, int N>
class View : public RawView {
 public:
  View(const char* name, Array array) : RawView(name, array, kind_of<T>(), N, !std::is_const_v<T>) {}
  T* data() const { return static_cast<T*>(data_); }
  T operator[](std::int64_t i) const { return data()[i]; }
};

}  // namespace ft::py

template <>
struct nanobind::detail::type_caster<ft::py::Array> {
  NB_TYPE_CASTER(ft::py::Array, const_name("torch.Tensor | numpy.typing.NDArray[typing.Any]"))
  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    value.object = source.ptr();
    return source.ptr() != Py_None;   // optional arguments say so
  }
};
