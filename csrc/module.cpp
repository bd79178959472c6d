// The Python face of what is no operator: the processor's instruction sets and the kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/attention/shares.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/integrity.h"
#include "cpu/gemm/k_parts.h"
#include "cpu/gemm/timing.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/selfcheck.h"
#include "cpu/ops/guard_counts.h"
#include "cuda/gemm/layout.h"
#include "generated_calls.h"
#include "operands.h"
#include "package_calls.h"
#include "program.h"
#include "stamps.h"
#include "tuning.h"

namespace {

using qfx::cpu::Format;
using qfx::cpu::Isa;
using qfx::cpu::Kernels;
using qfx::cpu::Operands;

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (Isa isa : qfx::cpu::usable_isas()) names.push_back(qfx::cpu::name_of(isa));
  return names;
}

const Format& format_for(int64_t rows, int64_t bits, int64_t w_bits) {
  const bool narrow = bits < 8, narrow_weight = w_bits < 8;
  const Operands operands = narrow ? narrow_weight ? Operands::kNarrow : Operands::kNarrowCodes
                            : narrow_weight ? Operands::kNarrowWeight
                                            : Operands::kWide;
  return qfx::cpu::format_for(qfx::cpu::kernels_of(qfx::cpu::current_isa()), operands, rows);
}

std::string kernel_for(int64_t rows, int64_t bits, int64_t w_bits) {
  const Kernels& kernels = qfx::cpu::kernels_of(qfx::cpu::current_isa());
  const Format& format = format_for(rows, bits, w_bits);
  const int64_t height = qfx::cpu::tile_rows_for(format, rows);
  return qfx::cpu::kernel_name(kernels, format, static_cast<int>(height));
}

int64_t multiply(int64_t rounds, int64_t bits, int64_t w_bits) {
  constexpr int64_t kMany = int64_t{1} << 40;
  const auto run = format_for(kMany, bits, w_bits).multiply;
  return run == nullptr ? 0 : run(rounds);
}

// One row per micro-kernel: mr rows of activations x nr columns of weights.
pybind11::list kernels() {
  pybind11::list rows;
  for (Isa isa : qfx::cpu::compiled_isas()) {
    const Kernels& k = qfx::cpu::kernels_of(isa);
    for (const Format* format : qfx::cpu::formats_of(k)) {
      for (int mr = 1; mr <= format->tile_rows; ++mr) {
        pybind11::dict row;
        row["name"] = qfx::cpu::kernel_name(k, *format, mr);
        row["isa"] = k.isa;
        row["mr"] = mr;
        row["nr"] = qfx::cpu::kPanel;
        row["supported"] = qfx::cpu::supported(isa);
        rows.append(row);
      }
    }
  }
  return rows;
}

using ProductTask = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

std::vector<std::vector<ProductTask>> product_shares(int64_t products, int64_t rows, int64_t panels,
                                                     int64_t tallest, int64_t block_rows,
                                                     int64_t threads) {
  if (std::min({products, rows, panels, tallest, block_rows, threads}) < 1) {
    throw std::invalid_argument("product_shares: each number is 1 or more");
  }
  using namespace qfx::cpu;
  const Grid grid = grid_of({products, rows, panels, tallest, block_rows}, threads);
  std::vector<std::vector<ProductTask>> shares(static_cast<size_t>(grid.shares()));
  for (size_t i = 0; i < shares.size(); ++i) {
    grid.for_each_task(static_cast<int64_t>(i), [&](const Task& t) {
      shares[i].emplace_back(t.product, t.block.begin, t.block.end, t.panel_begin, t.panel_end);
    });
  }
  return shares;
}

int64_t k_parts(int64_t rows, int64_t panels, int64_t tallest, int64_t block_rows, int64_t k,
                int64_t threads) {
  if (std::min({rows, panels, tallest, block_rows, k, threads}) < 1) {
    throw std::invalid_argument("k_parts: each number is 1 or more");
  }
  return qfx::cpu::k_parts_of({1, rows, panels, tallest, block_rows}, k, threads);
}

using Counts = std::tuple<int64_t, int64_t, int64_t, int64_t>;

Counts as_tuple(const qfx::cpu::GuardCounts& counts) {
  return {counts.calls, counts.rows, counts.float_calls, counts.float_rows};
}

std::map<std::string, Counts> guard_counts() {
  std::map<std::string, Counts> found;
  for (const auto& [site, counts] : qfx::cpu::guard_counts()) found[site] = as_tuple(counts);
  return found;
}

// As nvcc names them, without the dot: 75, ..., 90a.
std::vector<std::string> cuda_architectures() {
#if defined(QFX_CUDA_ARCHITECTURES)
  std::istringstream words(QFX_CUDA_ARCHITECTURES);
#else
  std::istringstream words;
#endif
  std::vector<std::string> names;
  for (std::string name; words >> name;) names.push_back(name);
  return names;
}

int64_t cuda_packed_size(const std::vector<int64_t>& layout, int64_t k) {
  const auto known = qfx::layout_argument_of("cuda_packed_size", layout);
  return qfx::cuda::WeightLayout::of(known.n, k, known.group, known.scale_group, known.shift != 0)
      .bytes();
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
  m.def("kernel_for", &kernel_for, pybind11::arg("rows"), pybind11::arg("bits") = 8,
        pybind11::arg("w_bits") = 8,
        "Name of the GEMM kernel that this many rows of codes of these bits run on.");
  m.def("multiply", &multiply, pybind11::arg("rounds"), pybind11::arg("bits") = 8,
        pybind11::arg("w_bits") = 8,
        "Runs the multiply instructions alone; returns how many multiply-accumulates they made.");
  m.def("kernels", &kernels,
        "The GEMM micro-kernels of this build: dicts of name, isa, mr, nr, supported.");
  m.def("share_of_cores", &qfx::cpu::share_of_cores, pybind11::arg("seconds"),
        "The part of its core that each of torch's threads gets if all work for so long; 1 where "
        "nothing else runs.");
  m.def(
      "attention_shares",
      [](int64_t heads, int64_t rows, int64_t keys, bool causal, int64_t threads) {
        return qfx::cpu::shares({heads, rows, keys, causal}, threads);
      },
      pybind11::arg("heads"), pybind11::arg("rows"), pybind11::arg("keys"), pybind11::arg("causal"),
      pybind11::arg("threads"),
      "Where each thread's rows of an int8 attention begin, counted through all heads, and end.");
  m.def(
      "whole_products", &qfx::cpu::whole_products, pybind11::arg("batch"), pybind11::arg("work"),
      pybind11::arg("threads"),
      "How many of a batch of products, of so many steps each, run whole on a thread; all threads "
      "share the rest.");
  m.def(
      "product_shares", &product_shares, pybind11::arg("products"), pybind11::arg("rows"),
      pybind11::arg("panels"), pybind11::arg("tallest"), pybind11::arg("block_rows"),
      pybind11::arg("threads"),
      "The tasks of each thread of so many products of rows and panels of 32 columns, in tiles of "
      "at most `tallest` rows: product, first row, end, first panel, end.");
  m.def("k_parts", &k_parts, pybind11::arg("rows"), pybind11::arg("panels"),
        pybind11::arg("tallest"), pybind11::arg("block_rows"), pybind11::arg("k"),
        pybind11::arg("threads"),
        "In how many parts K is cut where one product has fewer panels than keep all threads at "
        "work; 1 where it is not.");
  m.def(
      "read_packed_again", [] { qfx::cpu::forget_whole(); },
      "Has every packed weight compared with its checksum at its next use, as at its first.");
  m.def("guard_counts", &guard_counts,
        "By site: calls, rows, calls with rows in float, rows in float, of int8_linear_guarded.");
  m.def(
      "take_guard_counts",
      [](const std::string& site) { return as_tuple(qfx::cpu::take_guard_counts(site)); },
      pybind11::arg("site"), "The counts of one site, which then has none.");
  m.attr("activations") =
      std::vector<std::string>(std::begin(qfx::kActivationNames), std::end(qfx::kActivationNames));
  m.def("cuda_architectures", &cuda_architectures,
        "The architectures of GPUs that this build has kernels for; none without CUDA.");
  m.def("cuda_packed_size", &cuda_packed_size, pybind11::arg("layout"), pybind11::arg("k"),
        "Bytes of a packed weight of 8 bits on CUDA.");
  qfx::define_generated_calls(m);
  qfx::define_program(m);
  qfx::define_stamps(m);
  qfx::define_tuning(m);
  qfx::export_package_calls();
  qfx::cpu::current_isa();  // an impossible QFX_CPU_ISA is an error at import
  for (const std::string& fault : qfx::cpu::faults()) {
    if (PyErr_WarnEx(PyExc_RuntimeWarning, fault.c_str(), 1) < 0)
      throw pybind11::error_already_set();
  }
}
