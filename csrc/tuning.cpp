#include "tuning.h"

#include <pybind11/stl.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/gemm/timing.h"
#include "cpu/gemm/tuning.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/selfcheck.h"

namespace qfx {
namespace {

using cpu::Format;
using cpu::Isa;
using cpu::Kernels;
using cpu::kHintNames;
using cpu::kTuningFields;
using cpu::Tuning;
using cpu::TuningField;

const Kernels& kernels_named(const std::string& isa) {
  for (Isa known : cpu::compiled_isas()) {
    if (isa == cpu::name_of(known)) return cpu::kernels_of(known);
  }
  throw std::invalid_argument("this build has no kernels for an instruction set '" + isa + "'");
}

// Of an instruction set that this processor runs.
const Kernels& usable_kernels_named(const std::string& isa) {
  for (Isa usable : cpu::usable_isas()) {
    if (isa == cpu::name_of(usable)) return cpu::kernels_of(usable);
  }
  throw std::invalid_argument("this processor does not run the instruction set '" + isa + "'");
}

const Format& format_named(const Kernels& kernels, const std::string& name) {
  std::string names;
  for (const Format* format : cpu::formats_of(kernels)) {
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
  for (const Format* format : cpu::formats_of(kernels_named(isa))) {
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
  for (const Format* format : cpu::formats_of(kernels_named(isa))) {
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
      tuning.hint = cpu::hint_named(text_of(value));
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
  Tuning tuning = cpu::tuning_of(format);
  for (const auto& [parameter, value] : parameters) set_parameter(tuning, parameter, value);
  const std::string fault = cpu::fault_of(tuning);
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
    cpu::set_tuning(*format, tuning);
  }
}

// Of a format whose other parameters are those in use.
double seconds(cpu::TimedProduct& product, const std::string& isa, const std::string& name,
               const Parameters& parameters, int64_t rows, int64_t calls) {
  const Format& format = format_named(usable_kernels_named(isa), name);
  return product.seconds(format, changed(isa, format, parameters), rows, calls);
}

}  // namespace

void define_tuning(pybind11::module_& m) {
  m.def(
      "tuning", [](const std::string& isa) { return tunings_of(isa, cpu::tuning_of); },
      pybind11::arg("isa"),
      "The parameters in use of an instruction set's formats: format -> parameter -> value.");
  m.def(
      "default_tuning", [](const std::string& isa) { return tunings_of(isa, cpu::default_tuning); },
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
  pybind11::class_<cpu::TimedProduct>(
      m, "TimedProduct",
      "Products of codes [rows, k] and one of several weights [n, k], to be timed.")
      .def(pybind11::init<int64_t, int64_t, int64_t, int64_t>(), pybind11::arg("most_rows"),
           pybind11::arg("k"), pybind11::arg("n"), pybind11::arg("weights"))
      .def("seconds", &seconds, pybind11::arg("isa"), pybind11::arg("format"),
           pybind11::arg("parameters"), pybind11::arg("rows"), pybind11::arg("calls"),
           "Seconds of one product on a format, with some parameters other than those in use. "
           "calls=0: its weight, the next in turn, comes from memory; else the mean of so many "
           "calls.");
}

}  // namespace qfx
