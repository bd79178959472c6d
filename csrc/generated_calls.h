// Operators as the Python code that Inductor generates calls them: by the addresses of tensors
// whose sizes the compiler knows. A call of the dispatcher from Python takes 6 us, of which a
// linear of one short row takes 2.
#pragma once

#include <pybind11/pybind11.h>

namespace qfx {

void define_generated_calls(pybind11::module_& m);
void define_generated_convolutions(pybind11::module_& m);

}  // namespace qfx
