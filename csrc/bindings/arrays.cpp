#include "bindings/arrays.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

namespace ft::py {
namespace {

// The part of DLPack's C exchange interface that is used here (dlpack.h, version 1).
struct ExchangeApi {
  struct {
    std::uint32_t major, minor;
  } version;
  ExchangeApi* previous;
  void *allocate, *managed_from_object, *object_from_managed;
  int (*tensor_from_object)(void* object, nb::dlpack::dltensor* out);
  void* current_stream;
};

const ExchangeApi* find_exchange_api(PyTypeObject* type) {
  const nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api != nullptr && api->version.major > 1) api = api->previous;
  return api != nullptr && api->tensor_from_object != nullptr ? api : nullptr;
}

// The look-up on the type costs more than the exchange; almost every argument is a torch.Tensor.
const ExchangeApi* exchange_api(PyTypeObject* type) {
  static PyTypeObject* last_type = nullptr;   // held: its address must not be reused
  static const ExchangeApi* last_api = nullptr;
  if (type == last_type) return last_api;
  const ExchangeApi* api = find_exchange_api(type);
  if (api != nullptr) {
    Py_INCREF(type);
    Py_XDECREF(last_type);
    last_type = type;
    last_api = api;
  }
  return api;
}

struct KindInfo {
  const char* name;
  std::uint8_t dlpack_code;
  int bytes;
};

constexpr KindInfo kKinds[] = {
    {"float32", 2, 4}, {"float64", 2, 8}, {"int32", 0, 4}, {"int64", 0, 8}, {"uint8", 1, 1}, {"uint64", 1, 8}};

const KindInfo& info(Kind kind) { return kKinds[static_cast<int>(kind)]; }

std::string dlpack_type_name(nb::dlpack::dtype type) {
  const char* const names[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string base = type.code < std::size(names) ? names[type.code] : "type" + std::to_string(type.code);
  return base + std::to_string(type.bits);
}

std::string shape_text(int dims, const std::int64_t* shape) {
  std::string text = "[";
  for (int i = 0; i < dims; ++i) {
    text += (i > 0 ? ", " : "") + (shape[i] < 0 ? std::string("any") : std::to_string(shape[i]));
  }
  return text + "]";
}

[[noreturn]] void type_error(const char* name, const std::string& found, const std::string& expected) {
  throw nb::type_error((std::string(name) + ": found " + found + ", expected " + expected).c_str());
}

// `strides` count elements; null: contiguous.
bool contiguous(int dims, const std::int64_t* shape, const std::int64_t* strides) {
  std::int64_t expected = 1;
  bool dense = true;
  for (int i = dims - 1; i >= 0; --i) {
    if (shape[i] == 0) return true;
    if (strides != nullptr && shape[i] != 1 && strides[i] != expected) dense = false;
    expected *= shape[i];
  }
  return dense;
}

bool format_matches(std::string_view format, Kind kind) {
  if (!format.empty() && std::string_view("@=<").find(format.front()) != std::string_view::npos) {
    format.remove_prefix(1);   // native or little-endian, the same on every host that we build for
  }
  switch (kind) {
    case Kind::Float32: return format == "f";
    case Kind::Float64: return format == "d";
    case Kind::Int32: return format == "i" || (sizeof(long) == 4 && format == "l");
    case Kind::Int64: return format == "q" || (sizeof(long) == 8 && format == "l");
    case Kind::UInt8: return format == "B";
    case Kind::UInt64: return format == "Q" || (sizeof(long) == 8 && format == "L");
  }
  return false;
}

}  // namespace

RawView::RawView(const char* name, Array array, Kind kind, int dims, bool writable) : name_(name) {
  PyObject* object = array.object;
  if (const ExchangeApi* api = exchange_api(Py_TYPE(object))) {
    nb::dlpack::dltensor tensor{};
    if (api->tensor_from_object(object, &tensor) != 0) nb::raise_python_error();
    from_dlpack(tensor, kind);
  } else if (PyObject_CheckBuffer(object) != 0) {
    from_buffer(object, kind, writable);
  } else {
    type_error(name, std::string("an object of type ") + Py_TYPE(object)->tp_name,
               "a torch tensor or a NumPy array");
  }
  if (dims != kAnyDims && dims_ != dims) {
    const std::string found = "shape " + shape_text(dims_, shape_);
    PyBuffer_Release(&buffer_);   // no destructor runs for a half-made object
    type_error(name, found, std::to_string(dims) + " dimensions");
  }
}

RawView::~RawView() { PyBuffer_Release(&buffer_); }   // does nothing for one that was never filled

void RawView::from_dlpack(const nb::dlpack::dltensor& tensor, Kind kind) {
  if (tensor.device.device_type != nb::device::cpu::value) type_error(name_, "a tensor on another device", "a CPU tensor");
  const KindInfo& wanted = info(kind);
  if (tensor.dtype.code != wanted.dlpack_code || tensor.dtype.bits != wanted.bytes * 8 || tensor.dtype.lanes != 1) {
    type_error(name_, dlpack_type_name(tensor.dtype), wanted.name);
  }
  if (tensor.ndim > kMaxDims) type_error(name_, std::to_string(tensor.ndim) + " dimensions", "at most 4");
  if (!contiguous(tensor.ndim, tensor.shape, tensor.strides)) {
    type_error(name_, "strided memory", "contiguous memory (call .contiguous())");
  }
  dims_ = tensor.ndim;
  std::copy_n(tensor.shape, dims_, shape_);
  data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
}

void RawView::from_buffer(PyObject* object, Kind kind, bool writable) {
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  Py_buffer buffer;
  if (PyObject_GetBuffer(object, &buffer, flags) != 0) {
    const nb::python_error cause;
    type_error(name_, cause.what(), writable ? "a writable array" : "an array");
  }
  struct Release {
    Py_buffer* buffer;
    ~Release() { PyBuffer_Release(buffer); }
  } release{&buffer};
  const KindInfo& wanted = info(kind);
  const std::string format = buffer.format != nullptr ? buffer.format : "B";
  if (buffer.itemsize != wanted.bytes || !format_matches(format, kind)) {
    type_error(name_, "items of type '" + format + "'", wanted.name);
  }
  if (buffer.ndim > kMaxDims) type_error(name_, std::to_string(buffer.ndim) + " dimensions", "at most 4");
  std::int64_t strides[kMaxDims];
  dims_ = buffer.ndim;
  for (int i = 0; i < dims_; ++i) {
    shape_[i] = buffer.shape[i];
    strides[i] = buffer.strides[i] % wanted.bytes == 0 ? buffer.strides[i] / wanted.bytes : -1;
  }
  if (!contiguous(dims_, shape_, strides)) {
    type_error(name_, "strided memory", "contiguous memory (numpy.ascontiguousarray)");
  }
  data_ = buffer.buf;
  std::swap(buffer_, buffer);   // what is released now is the empty one
}

std::int64_t RawView::size() const {
  std::int64_t size = 1;
  for (int i = 0; i < dims_; ++i) size *= shape_[i];
  return size;
}

void RawView::expect(std::initializer_list<std::int64_t> shape) const {
  bool equal = static_cast<int>(shape.size()) == dims_;
  for (int i = 0; equal && i < dims_; ++i) equal = shape.begin()[i] < 0 || shape.begin()[i] == shape_[i];
  if (!equal) refuse("shape " + shape_text(dims_, shape_), shape_text(static_cast<int>(shape.size()), shape.begin()));
}

void RawView::expect_like(const RawView& other) const {
  if (dims_ == other.dims_ && std::equal(shape_, shape_ + dims_, other.shape_)) return;
  refuse("shape " + shape_text(dims_, shape_), shape_text(other.dims_, other.shape_) + " like " + other.name_);
}

void RawView::refuse(const std::string& found, const std::string& expected) const {
  refuse_array(name_, found, expected);
}

void refuse_array(const char* name, const std::string& found, const std::string& expected) {
  throw nb::value_error((std::string(name) + ": found " + found + ", expected " + expected).c_str());
}

}  // namespace ft::py
