#include "generated_calls.h"

#include <exception>
#include <span>
#include <stdexcept>
#include <vector>

#include "cpu/ops/linear.h"
#include "implement.h"
#include "recorded_call.h"
#include "tensor_address.h"

namespace qfx {
namespace {

namespace py = pybind11;

// The numbers that follow the tensors, in their order: those of the call, and then of each weight.
enum Number { kHasFactor, kRows, kK, kDtypeOfX, kDtypeOfY, kCode, kNumbers = kCode + 5 };
enum WeightNumber {
  kWeightBytes,
  kDtypeOfBias,  // or -1 without a bias
  kActivation,
  kLayout,
  kWeightNumbers = kLayout + 5
};
constexpr int64_t kMostWeights = 64;

using Numbers = std::span<const int64_t>;

// The operator of so many weights, for errors and profilers.
const char* operator_of(int64_t weights) { return weights == 1 ? "linear_dynamic" : "linears"; }

const TensorAddress& address() {
  static const TensorAddress* const made = new TensorAddress;  // outlives the interpreter
  return *made;
}

template <typename T>
T* data_of(PyObject* tensor) {
  return reinterpret_cast<T*>(address()(tensor));
}

Dtype dtype_at(int64_t place) {
  if (place < 0 || place >= kDtypes) throw std::invalid_argument("linears: unknown dtype");
  return static_cast<Dtype>(place);
}

Activation activation_at(int64_t place) {
  if (place >= 0 && place < static_cast<int64_t>(std::size(kActivations))) {
    return kActivations[place];
  }
  throw std::invalid_argument("linears: unknown activation");
}

// x, then each weight and its bias where it has one, then the factor if there is one.
class Operands {
 public:
  Operands(PyObject* const* tensors, int64_t count) : next_(tensors), end_(tensors + count) {}

  template <typename T>
  T* take() {
    if (next_ == end_) throw std::invalid_argument("linears: fewer tensors than announced");
    return data_of<T>(*next_++);
  }

  void finish() const {
    if (next_ != end_) throw std::invalid_argument("linears: more tensors than announced");
  }

 private:
  PyObject* const* next_;
  PyObject* const* const end_;
};

cpu::LinearWeightAt weight_of(const char* op, Operands& from, Numbers numbers) {
  cpu::LinearWeightAt w = {};
  w.weight = from.take<const int8_t>();
  w.weight_bytes = numbers[kWeightBytes];
  w.layout = layout_argument_of(op, numbers.subspan(kLayout, 5));
  w.activation = activation_at(numbers[kActivation]);
  if (numbers[kDtypeOfBias] >= 0) {
    w.bias_dtype = dtype_at(numbers[kDtypeOfBias]);
    w.bias = from.take<const void>();
  }
  return w;
}

// Throws an exception of Python for what is no integer.
std::vector<int64_t> numbers_of(PyObject* const* arguments, size_t count) {
  std::vector<int64_t> numbers(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = PyLong_AsLongLong(arguments[i]);
  if (PyErr_Occurred()) throw py::error_already_set();
  return numbers;
}

// The number of weights comes last, and says how many numbers come before it.
void call_linears(PyObject* const* arguments, Py_ssize_t count) {
  const int64_t weights = count > 0 ? PyLong_AsLongLong(arguments[count - 1]) : 0;
  if (PyErr_Occurred()) throw py::error_already_set();
  const int64_t size = kNumbers + weights * kWeightNumbers + 1, tensors = count - size;
  if (weights < 1 || weights > kMostWeights || tensors < 2) {
    throw std::invalid_argument("linears: arguments are missing");
  }
  const char* op = operator_of(weights);
  const std::vector<int64_t> all = numbers_of(arguments + tensors, static_cast<size_t>(size));
  const Numbers numbers = all;
  Operands from(arguments, tensors);
  cpu::LinearsAt call = {};
  call.x = from.take<const void>();
  call.dtype = dtype_at(numbers[kDtypeOfX]);
  call.rows = numbers[kRows];
  call.k = numbers[kK];
  call.code = activation_code_of(op, numbers.subspan(kCode, 5));
  call.out_dtype = dtype_at(numbers[kDtypeOfY]);
  std::vector<cpu::LinearWeightAt> each;
  for (int64_t i = 0; i < weights; ++i) {
    each.push_back(weight_of(op, from, numbers.subspan(kNumbers + i * kWeightNumbers)));
  }
  if (numbers[kHasFactor] != 0) call.factor = from.take<const float>();
  from.finish();
  call.y = data_of<void>(arguments[count]);
  const py::gil_scoped_release released;
  const RecordedCall recorded(weights == 1 ? "qfx::linear_dynamic" : "qfx::linears");
  linears_at(op, call, each);
}

// linears(x, weight[, bias], ...[, factor], numbers..., out=y)
PyObject* linears(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count,
                  PyObject* names) {
  try {
    if (names == nullptr || PyTuple_GET_SIZE(names) != 1) {
      throw std::invalid_argument("linears: expected out=");
    }
    call_linears(arguments, count);
    Py_RETURN_NONE;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const OutOfMemory& why) {
    PyErr_Format(PyExc_RuntimeError, "linears: %s", why.what());
  } catch (const std::exception& why) {
    PyErr_SetString(PyExc_RuntimeError, why.what());
  }
  return nullptr;
}

}  // namespace

void define_generated_calls(py::module_& m) {
  static PyMethodDef method = {
      "linears", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&linears)),
      METH_FASTCALL | METH_KEYWORDS,
      "qfx::linears, and qfx::linear_dynamic as one of them, as compiled graphs call them: "
      "addresses are taken from tensors unchecked. The outputs lie one after the other in `out`."};
  PyObject* function = PyCFunction_NewEx(&method, nullptr, nullptr);
  if (function == nullptr) throw py::error_already_set();
  m.attr("linears") = py::reinterpret_steal<py::object>(function);
}

}  // namespace qfx
