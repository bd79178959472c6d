// Operators as the Python code that Inductor generates calls them: name(tensors..., numbers...,
// out=y). Neither the dispatcher nor a conversion of lists stands between.
#include <stdexcept>
#include <vector>

#include "python/parts.h"
#include "python/tensor_address.h"

namespace qfx::python {
namespace {

const TensorAddress& address() {
  static const TensorAddress* const made = new TensorAddress;  // outlives the interpreter
  return *made;
}

using Operator = QfxStatus (*)(const void* const*, int64_t, const int64_t*, int64_t, void*);

// Tensors, then integers, up to `count`, and then y.
void run(Operator call, PyObject* const* arguments, Py_ssize_t count) {
  std::vector<const void*> tensors;
  Py_ssize_t i = 0;
  for (; i < count && PyLong_Check(arguments[i]) == 0; ++i) {
    tensors.push_back(reinterpret_cast<const void*>(address()(arguments[i])));
  }
  std::vector<int64_t> numbers;
  numbers.reserve(static_cast<size_t>(count - i));
  for (; i < count; ++i) numbers.push_back(PyLong_AsLongLong(arguments[i]));
  if (PyErr_Occurred() != nullptr) throw Raised();
  auto* y = reinterpret_cast<void*>(address()(arguments[count]));
  QfxStatus status = kQfxDone;
  {
    const Unlocked unlocked;
    status = call(tensors.data(), static_cast<int64_t>(tensors.size()), numbers.data(),
                  static_cast<int64_t>(numbers.size()), y);
  }
  if (status == kQfxDone) return;
  PyErr_SetString(PyExc_RuntimeError, qfx_api_error());
  throw Raised();
}

template <Operator call>
PyObject* answered(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count,
                   PyObject* names) {
  return result_of([&] {
    if (names == nullptr || PyTuple_Size(names) != 1) {
      throw std::invalid_argument("a call of generated code has out= and no other name");
    }
    run(call, arguments, count);
    return none();
  });
}

template <Operator call>
PyMethodDef direct(const char* name, const char* doc) {
  auto* function = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&answered<call>));
  return {name, function, METH_FASTCALL | METH_KEYWORDS, doc};
}

}  // namespace

void add_generated_calls(PyObject* module) {
  static PyMethodDef methods[] = {
      direct<qfx_api_linears>(
          "linears",
          "qfx::linears, and qfx::linear_dynamic as one of them, as compiled graphs call them: "
          "addresses are taken from tensors unchecked. The outputs lie one after the other in "
          "`out`."),
      direct<qfx_api_convolution>(
          "convolution",
          "qfx::conv_dynamic and qfx::conv_depthwise, as compiled graphs call them: addresses are "
          "taken from tensors unchecked."),
      {nullptr, nullptr, 0, nullptr}};
  add_functions(module, methods);
}

}  // namespace qfx::python
