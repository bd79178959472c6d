// Operators as packages of AOTInductor call them: C functions, so that neither the dispatcher nor
// autograd's kernels in Python run. A package finds them by name among the symbols of the process.
// Names and arguments follow from the operators' schemas (qfx/host/inductor_packages.py).
#pragma once

namespace qfx {

// Makes these functions visible to libraries that are loaded later.
void export_package_calls();

}  // namespace qfx
