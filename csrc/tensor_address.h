// The address of the data of a tensor that is a Python object.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace qfx {

class TensorAddress {
 public:
  TensorAddress() {
    data_ptr_ = pybind11::module_::import("torch").attr("Tensor").attr("data_ptr");
    // The function through which Inductor's generated code reads its arguments: 5 ns, not 40.
    const pybind11::object guards = pybind11::module_::import("torch._C._dynamo.guards");
    const pybind11::object fast =
        pybind11::getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", pybind11::none());
    if (!fast.is_none()) fast_data_ptr_ = reinterpret_cast<DataPtr>(fast.cast<uintptr_t>());
  }

  uintptr_t operator()(PyObject* tensor) const {
    if (fast_data_ptr_ != nullptr) return reinterpret_cast<uintptr_t>(fast_data_ptr_(tensor));
    return data_ptr_(pybind11::handle(tensor)).cast<uintptr_t>();
  }

 private:
  using DataPtr = void* (*)(PyObject*);

  pybind11::object data_ptr_;
  DataPtr fast_data_ptr_ = nullptr;
};

}  // namespace qfx
