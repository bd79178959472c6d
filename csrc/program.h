// Programs, as Python makes and runs them.
#pragma once

#include <pybind11/pybind11.h>

namespace qfx {

void define_program(pybind11::module_& m);

}  // namespace qfx
