// The parts of qfx._C, each of which adds its functions and classes to the module.
#pragma once

#include <Python.h>

namespace qfx::python {

void add_processor(PyObject* module);
void add_shares(PyObject* module);
void add_generated_calls(PyObject* module);
void add_program(PyObject* module);
void add_stamps(PyObject* module);
void add_tuning(PyObject* module);

}  // namespace qfx::python
