// qfx._C: the Python face of libqfx. Importing it loads libqfx, which registers the operators.
#include "python/convert.h"
#include "python/parts.h"

namespace qfx::python {
namespace {

void fill(PyObject* module) {
  const char* name = nullptr;
  check(qfx_api_isa(&name));  // an impossible QFX_CPU_ISA is an error at import
  add_processor(module);
  add_shares(module);
  add_generated_calls(module);
  add_program(module);
  add_stamps(module);
  add_tuning(module);
  for (const ResultRow& fault : rows_of(qfx_api_faults)) {
    if (PyErr_WarnEx(PyExc_RuntimeWarning, fault.texts.at(0).c_str(), 1) < 0) throw Raised();
  }
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "qfx._C",
    "qfx kernels: loading this module registers the operators torch.ops.qfx.*",
    -1,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr};

}  // namespace
}  // namespace qfx::python

PyMODINIT_FUNC PyInit__C() {
  using namespace qfx::python;
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  try {
    fill(module);
    return module;
  } catch (const Raised&) {
  } catch (const std::exception& why) {
    PyErr_SetString(PyExc_ImportError, why.what());
  }
  Py_DECREF(module);
  return nullptr;
}
