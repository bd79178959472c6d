// The Python face of how kernels work: the parameters of each format, and products that time them.
#pragma once

#include <pybind11/pybind11.h>

namespace qfx {

void define_tuning(pybind11::module_& m);

}  // namespace qfx
