#include "generated_calls.h"

#include <array>
#include <exception>

#include "cpu/ops/linear.h"
#include "implement.h"
#include "recorded_call.h"
#include "tensor_address.h"

namespace qfx {
namespace {

namespace py = pybind11;

constexpr const char* kOp = "linear_dynamic";

// The numbers that follow the tensors, in their order.
enum Number {
  kHasFactor,
  kRows,
  kK,
  kWeightBytes,
  kDtypeOfX,
  kDtypeOfBias,  // or -1 without a bias
  kDtypeOfY,
  kActivation,
  kLayout,
  kCode = kLayout + 5,
  kNumbers = kCode + 5
};
using Numbers = std::array<int64_t, kNumbers>;

const TensorAddress& address() {
  static const TensorAddress* const made = new TensorAddress;  // outlives the interpreter
  return *made;
}

template <typename T>
T* data_of(PyObject* tensor) {
  return reinterpret_cast<T*>(address()(tensor));
}

Dtype dtype_at(int64_t place) {
  if (place < 0 || place >= kDtypes) throw std::invalid_argument("linear_dynamic: unknown dtype");
  return static_cast<Dtype>(place);
}

Activation activation_at(int64_t place) {
  if (place >= 0 && place < static_cast<int64_t>(std::size(kActivations))) {
    return kActivations[place];
  }
  throw std::invalid_argument("linear_dynamic: unknown activation");
}

// Tensors x, weight, bias or none, factor or none; then the numbers; then the output.
cpu::LinearAt linear_of(PyObject* const* arguments, const Numbers& numbers) {
  const bool has_bias = numbers[kDtypeOfBias] >= 0, has_factor = numbers[kHasFactor] != 0;
  cpu::LinearAt call = {};
  call.x = data_of<const void>(arguments[0]);
  call.dtype = dtype_at(numbers[kDtypeOfX]);
  call.rows = numbers[kRows];
  call.k = numbers[kK];
  call.weight = data_of<const int8_t>(arguments[1]);
  call.weight_bytes = numbers[kWeightBytes];
  call.layout = layout_argument_of(kOp, std::span(numbers).subspan<kLayout, 5>());
  if (has_bias) {
    call.bias = data_of<const void>(arguments[2]);
    call.bias_dtype = dtype_at(numbers[kDtypeOfBias]);
  }
  if (has_factor) call.factor = data_of<const float>(arguments[has_bias ? 3 : 2]);
  call.code = activation_code_of(kOp, std::span(numbers).subspan<kCode, 5>());
  call.activation = activation_at(numbers[kActivation]);
  call.out_dtype = dtype_at(numbers[kDtypeOfY]);
  return call;
}

// Throws an exception of Python for what is no integer.
Numbers numbers_of(PyObject* const* arguments) {
  Numbers numbers;
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = PyLong_AsLongLong(arguments[i]);
  if (PyErr_Occurred()) throw py::error_already_set();
  return numbers;
}

void call_linear(PyObject* const* arguments, Py_ssize_t count) {
  const Py_ssize_t tensors = count - kNumbers;
  if (tensors < 2) throw std::invalid_argument("linear_dynamic: arguments are missing");
  const Numbers numbers = numbers_of(arguments + tensors);
  const bool optional = (numbers[kDtypeOfBias] >= 0) + (numbers[kHasFactor] != 0) == tensors - 2;
  if (!optional) throw std::invalid_argument("linear_dynamic: other tensors than announced");
  cpu::LinearAt call = linear_of(arguments, numbers);
  call.y = data_of<void>(arguments[count]);
  const py::gil_scoped_release released;
  const RecordedCall recorded("qfx::linear_dynamic");
  linear_at(kOp, call);
}

// linear_dynamic(x, weight[, bias][, factor], numbers..., out=y)
PyObject* linear_dynamic(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count,
                         PyObject* names) {
  try {
    if (names == nullptr || PyTuple_GET_SIZE(names) != 1) {
      throw std::invalid_argument("linear_dynamic: expected out=");
    }
    call_linear(arguments, count);
    Py_RETURN_NONE;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const OutOfMemory& why) {
    PyErr_Format(PyExc_RuntimeError, "%s: %s", kOp, why.what());
  } catch (const std::exception& why) {
    PyErr_SetString(PyExc_RuntimeError, why.what());
  }
  return nullptr;
}

}  // namespace

void define_generated_calls(py::module_& m) {
  static PyMethodDef method = {
      "linear_dynamic", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&linear_dynamic)),
      METH_FASTCALL | METH_KEYWORDS,
      "The operator as compiled graphs call it: addresses are taken from tensors unchecked."};
  PyObject* function = PyCFunction_NewEx(&method, nullptr, nullptr);
  if (function == nullptr) throw py::error_already_set();
  m.attr("linear_dynamic") = py::reinterpret_steal<py::object>(function);
}

}  // namespace qfx
