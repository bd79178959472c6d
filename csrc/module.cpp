// The Python face of what is no operator: the processor's instruction sets and the kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/dispatch.h"

namespace {

using qfx::cpu::Isa;

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (Isa isa : qfx::cpu::supported_isas()) names.push_back(qfx::cpu::name_of(isa));
  return names;
}

pybind11::list kernels() {
  pybind11::list rows;
  for (Isa isa : qfx::cpu::supported_isas()) {
    const qfx::cpu::Kernels& k = qfx::cpu::kernels_of(isa);
    const std::string name = "s8s8_gemm_" + std::to_string(k.tile_rows) + "x" +
                             std::to_string(qfx::cpu::kPanel) + "__" + k.isa;
    pybind11::dict row;
    row["name"] = name;
    row["isa"] = k.isa;
    row["tile_rows"] = k.tile_rows;
    row["tile_columns"] = qfx::cpu::kPanel;
    rows.append(row);
  }
  return rows;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "qfx kernels: loading this module registers the operators torch.ops.qfx.*";
  m.def(
      "isa", [] { return qfx::cpu::name_of(qfx::cpu::current_isa()); },
      "The instruction set the kernels run on.");
  m.def("isas", &isas, "The instruction sets of this machine, best first.");
  m.def("set_isa", &qfx::cpu::set_isa, pybind11::arg("name"),
        "Runs the kernels on another instruction set of this machine; ValueError if it has none.");
  m.def("kernels", &kernels, "The GEMM kernels of this machine, best first.");
  qfx::cpu::current_isa();  // an impossible QFX_CPU_ISA is an error at import
}
