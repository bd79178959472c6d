// Whether the weights of a call are those of an earlier call, unchanged; and what feeds the graph.
#pragma once

#include <pybind11/pybind11.h>

namespace qfx {

void define_stamps(pybind11::module_& m);

}  // namespace qfx
