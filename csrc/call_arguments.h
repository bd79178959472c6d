// Arguments of operators in calls of generated code: tensors, and then numbers.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <span>
#include <stdexcept>
#include <vector>

#include "cpu/ops/linear.h"
#include "implement.h"
#include "tensor_address.h"

namespace qfx {

using Numbers = std::span<const int64_t>;

// The numbers of a weight, in their order.
enum WeightNumber {
  kWeightBytes,
  kDtypeOfBias,  // or -1 without a bias
  kActivation,
  kLayout,
  kWeightNumbers = kLayout + 5
};

inline const TensorAddress& address() {
  static const TensorAddress* const made = new TensorAddress;  // outlives the interpreter
  return *made;
}

template <typename T>
T* data_of(PyObject* tensor) {
  return reinterpret_cast<T*>(address()(tensor));
}

// `op` is named in errors, as below.
inline Dtype dtype_at(const char* op, int64_t place) {
  if (place >= 0 && place < kDtypes) return static_cast<Dtype>(place);
  throw std::invalid_argument(std::string(op) + ": unknown dtype");
}

inline Activation activation_at(const char* op, int64_t place) {
  if (place >= 0 && place < static_cast<int64_t>(std::size(kActivations))) {
    return kActivations[place];
  }
  throw std::invalid_argument(std::string(op) + ": unknown activation");
}

// The tensors of a call, one after the other.
class Operands {
 public:
  Operands(const char* op, PyObject* const* tensors, int64_t count)
      : op_(op), next_(tensors), end_(tensors + count) {}

  template <typename T>
  T* take() {
    if (next_ == end_) fail("fewer tensors than announced");
    return data_of<T>(*next_++);
  }

  void finish() const {
    if (next_ != end_) fail("more tensors than announced");
  }

 private:
  [[noreturn]] void fail(const char* why) const {
    throw std::invalid_argument(std::string(op_) + ": " + why);
  }

  const char* op_;
  PyObject* const* next_;
  PyObject* const* const end_;
};

// Takes the weight, and its bias where it has one.
inline cpu::LinearWeightAt weight_of(const char* op, Operands& from, Numbers numbers) {
  cpu::LinearWeightAt w = {};
  w.weight = from.take<const int8_t>();
  w.weight_bytes = numbers[kWeightBytes];
  w.layout = layout_argument_of(op, numbers.subspan(kLayout, 5));
  w.activation = activation_at(op, numbers[kActivation]);
  if (numbers[kDtypeOfBias] >= 0) {
    w.bias_dtype = dtype_at(op, numbers[kDtypeOfBias]);
    w.bias = from.take<const void>();
  }
  return w;
}

// Throws an exception of Python for what is no integer.
inline std::vector<int64_t> numbers_of(PyObject* const* arguments, size_t count) {
  std::vector<int64_t> numbers(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = PyLong_AsLongLong(arguments[i]);
  if (PyErr_Occurred()) throw pybind11::error_already_set();
  return numbers;
}

// The last of `count` arguments.
inline int64_t last_number(PyObject* const* arguments, Py_ssize_t count) {
  const int64_t number = count > 0 ? PyLong_AsLongLong(arguments[count - 1]) : 0;
  if (PyErr_Occurred()) throw pybind11::error_already_set();
  return number;
}

// name(tensors..., numbers..., out=y): runs `call` with the arguments and their number without y,
// which follows them; its exceptions become those of Python.
template <typename Call>
PyObject* answered(const char* name, PyObject* const* arguments, Py_ssize_t count, PyObject* names,
                   const Call& call) {
  try {
    if (names == nullptr || PyTuple_GET_SIZE(names) != 1) {
      throw std::invalid_argument(std::string(name) + ": expected out=");
    }
    call(arguments, count);
    Py_RETURN_NONE;
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const OutOfMemory& why) {
    PyErr_Format(PyExc_RuntimeError, "%s: %s", name, why.what());
  } catch (const std::exception& why) {
    PyErr_SetString(PyExc_RuntimeError, why.what());
  }
  return nullptr;
}

// Adds a function that generated code calls to a module. `method` lives as long as the process.
inline void define_call(pybind11::module_& m, PyMethodDef* method) {
  PyObject* function = PyCFunction_NewEx(method, nullptr, nullptr);
  if (function == nullptr) throw pybind11::error_already_set();
  m.attr(method->ml_name) = pybind11::reinterpret_steal<pybind11::object>(function);
}

}  // namespace qfx
