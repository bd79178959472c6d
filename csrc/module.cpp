// The Python face of what is no operator: the processor's instruction sets and the kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/dispatch.h"
#include "cpu/gemm.h"
#include "stamps.h"

namespace {

using qfx::cpu::Isa;

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (Isa isa : qfx::cpu::supported_isas()) names.push_back(qfx::cpu::name_of(isa));
  return names;
}

// One row per micro-kernel: mr rows of activations x nr columns of weights.
std::string kernel_name(const qfx::cpu::Kernels& kernels, int64_t mr) {
  return "s8s8_gemm_" + std::to_string(mr) + "x" + std::to_string(qfx::cpu::kPanel) + "__" +
         kernels.isa;
}

std::string kernel_for(int64_t rows) {
  const qfx::cpu::Kernels& kernels = qfx::cpu::kernels_of(qfx::cpu::current_isa());
  return kernel_name(kernels, qfx::cpu::tile_rows_for(kernels, rows));
}

int64_t multiply(int64_t rounds) {
  const auto run = qfx::cpu::kernels_of(qfx::cpu::current_isa()).multiply;
  return run == nullptr ? 0 : run(rounds);
}

pybind11::list kernels() {
  pybind11::list rows;
  for (Isa isa : qfx::cpu::compiled_isas()) {
    const qfx::cpu::Kernels& k = qfx::cpu::kernels_of(isa);
    for (int mr = 1; mr <= k.tile_rows; ++mr) {
      pybind11::dict row;
      row["name"] = kernel_name(k, mr);
      row["isa"] = k.isa;
      row["mr"] = mr;
      row["nr"] = qfx::cpu::kPanel;
      row["supported"] = qfx::cpu::supported(isa);
      rows.append(row);
    }
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
  m.def("kernel_for", &kernel_for, pybind11::arg("rows"),
        "Name of the GEMM kernel that this many rows run on.");
  m.def("multiply", &multiply, pybind11::arg("rounds"),
        "Runs the multiply instructions alone; returns how many multiply-accumulates they made.");
  m.def("kernels", &kernels,
        "The GEMM micro-kernels of this build: dicts of name, isa, mr, nr, supported.");
  qfx::define_stamps(m);
  qfx::cpu::current_isa();  // an impossible QFX_CPU_ISA is an error at import
}
