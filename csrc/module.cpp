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
#include "cpu/gemm/timing.h"
#include "cpu/gemm/tuning.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/selfcheck.h"
#include "cpu/ops/guard_counts.h"
#include "cuda/gemm/layout.h"
#include "generated_calls.h"
#include "operands.h"
#include "package_calls.h"
#include "program.h"
#include "stamps.h"

namespace {

using qfx::cpu::Format;
using qfx::cpu::Isa;
using qfx::cpu::Kernels;
using qfx::cpu::kHintNames;
using qfx::cpu::kTuningFields;
using qfx::cpu::Operands;
using qfx::cpu::Tuning;
using qfx::cpu::TuningField;

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

const Kernels& kernels_named(const std::string& isa) {
  for (Isa known : qfx::cpu::compiled_isas()) {
    if (isa == qfx::cpu::name_of(known)) return qfx::cpu::kernels_of(known);
  }
  throw std::invalid_argument("this build has no kernels for an instruction set '" + isa + "'");
}

// Of an instruction set that this processor runs.
const Kernels& usable_kernels_named(const std::string& isa) {
  for (Isa usable : qfx::cpu::usable_isas()) {
    if (isa == qfx::cpu::name_of(usable)) return qfx::cpu::kernels_of(usable);
  }
  throw std::invalid_argument("this processor does not run the instruction set '" + isa + "'");
}

const Format& format_named(const Kernels& kernels, const std::string& name) {
  std::string names;
  for (const Format* format : qfx::cpu::formats_of(kernels)) {
    if (name == format->name) return *format;
    names += std::string(names.empty() ? "" : ", ") + format->name;
  }
  throw std::invalid_argument(std::string(kernels.isa) + " has no format '" + name +
                              "', but: " + names);
}

pybind11::dict dict_of(const Tuning& tuning) {
  pybind11::dict found;
  for (const TuningField& field : kTuningFields) found[field.name] = tuning.*field.value;
  found["hint"] = kHintNames[tuning.hint];
  return found;
}

// What of a format there is to choose: name, the greatest number of rows with tiles for each hint
// and with pairs of panels, and the format below it.
pybind11::list choices(const std::string& isa) {
  pybind11::list found;
  for (const Format* format : qfx::cpu::formats_of(kernels_named(isa))) {
    pybind11::dict row;
    row["name"] = format->name;
    row["few_rows"] = format->few.rows;
    row["pair_rows"] = format->pairs.rows;
    row["below"] = format->below == nullptr ? "" : format->below->name;
    found.append(row);
  }
  return found;
}

// Format -> parameter -> value.
pybind11::dict tunings_of(const std::string& isa, Tuning (*tuning)(const Format&)) {
  pybind11::dict found;
  for (const Format* format : qfx::cpu::formats_of(kernels_named(isa))) {
    found[format->name] = dict_of(tuning(*format));
  }
  return found;
}

std::string text_of(pybind11::handle value) { return pybind11::str(value).cast<std::string>(); }

int64_t integer_of(const std::string& name, pybind11::handle value) {
  if (!pybind11::isinstance<pybind11::int_>(value)) {
    throw pybind11::type_error(name + " is an integer, got " + text_of(value));
  }
  int overflow = 0;
  const int64_t found = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow == 0) return found;
  throw std::invalid_argument(name + "=" + text_of(value) + " does not fit into 64 bits");
}

void set_parameter(Tuning& tuning, const std::string& name, pybind11::handle value) {
  std::string names;
  for (const TuningField& field : kTuningFields) {
    names += std::string(names.empty() ? "" : ", ") + field.name;
    if (name != field.name) continue;
    if (field.value == &Tuning::hint) {
      tuning.hint = qfx::cpu::hint_named(text_of(value));
    } else {
      tuning.*field.value = integer_of(name, value);
    }
    return;
  }
  throw std::invalid_argument("a format has no parameter '" + name + "', but: " + names);
}

using Parameters = std::map<std::string, pybind11::object>;

// Those in use, with some changed.
Tuning changed(const std::string& isa, const Format& format, const Parameters& parameters) {
  Tuning tuning = qfx::cpu::tuning_of(format);
  for (const auto& [parameter, value] : parameters) set_parameter(tuning, parameter, value);
  const std::string fault = qfx::cpu::fault_of(tuning);
  if (!fault.empty()) throw std::invalid_argument(isa + ", format " + format.name + ": " + fault);
  return tuning;
}

// All of them are read before the first is set.
std::vector<std::pair<const Format*, Tuning>> read_tunings(
    const std::string& isa, const std::map<std::string, Parameters>& given) {
  const Kernels& kernels = kernels_named(isa);
  std::vector<std::pair<const Format*, Tuning>> made;
  for (const auto& [name, parameters] : given) {
    const Format& format = format_named(kernels, name);
    made.emplace_back(&format, changed(isa, format, parameters));
  }
  return made;
}

void check_tuning(const std::string& isa, const std::map<std::string, Parameters>& given) {
  read_tunings(isa, given);
}

void set_tuning(const std::string& isa, const std::map<std::string, Parameters>& given) {
  for (const auto& [format, tuning] : read_tunings(isa, given)) {
    qfx::cpu::set_tuning(*format, tuning);
  }
}

// Of a format whose other parameters are those in use.
double seconds(qfx::cpu::TimedProduct& product, const std::string& isa, const std::string& name,
               const Parameters& parameters, int64_t rows, int64_t calls) {
  const Format& format = format_named(usable_kernels_named(isa), name);
  return product.seconds(format, changed(isa, format, parameters), rows, calls);
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
  m.def(
      "tuning", [](const std::string& isa) { return tunings_of(isa, qfx::cpu::tuning_of); },
      pybind11::arg("isa"),
      "The parameters in use of an instruction set's formats: format -> parameter -> value.");
  m.def(
      "default_tuning",
      [](const std::string& isa) { return tunings_of(isa, qfx::cpu::default_tuning); },
      pybind11::arg("isa"), "Those in use on this family of processors where none were set.");
  m.def("set_tuning", &set_tuning, pybind11::arg("isa"), pybind11::arg("tuning"),
        "Sets some parameters of some formats, given as `tuning` returns them. ValueError for a "
        "name that is none and a value out of bounds; then nothing is set. amx shares the format "
        "s8s8 of avx512vnni.");
  m.def("check_tuning", &check_tuning, pybind11::arg("isa"), pybind11::arg("tuning"),
        "Raises ValueError or TypeError where set_tuning would, and sets nothing.");
  m.def("choices", &choices, pybind11::arg("isa"),
        "What there is to choose for each format of an instruction set: dicts of name, few_rows "
        "and pair_rows (the most rows for which `hint` and `streams` count), below ('' for none).");
  pybind11::class_<qfx::cpu::TimedProduct>(
      m, "TimedProduct",
      "Products of codes [rows, k] and one of several weights [n, k], to be timed.")
      .def(pybind11::init<int64_t, int64_t, int64_t, int64_t>(), pybind11::arg("most_rows"),
           pybind11::arg("k"), pybind11::arg("n"), pybind11::arg("weights"))
      .def("seconds", &seconds, pybind11::arg("isa"), pybind11::arg("format"),
           pybind11::arg("parameters"), pybind11::arg("rows"), pybind11::arg("calls"),
           "Seconds of one product on a format, with some parameters other than those in use. "
           "calls=0: its weight, the next in turn, comes from memory; else the mean of so many "
           "calls.");
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
  qfx::export_package_calls();
  qfx::cpu::current_isa();  // an impossible QFX_CPU_ISA is an error at import
  for (const std::string& fault : qfx::cpu::faults()) {
    if (PyErr_WarnEx(PyExc_RuntimeWarning, fault.c_str(), 1) < 0)
      throw pybind11::error_already_set();
  }
}
