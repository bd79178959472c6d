#include "program.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/gemm/tuning.h"
#include "cpu/program/program.h"

namespace qfx {
namespace {

namespace py = pybind11;
using cpu::Program;

void stream(Program& program, const std::string& hint, int64_t ahead, int64_t streams) {
  if (hint.empty()) return program.stream({});
  program.stream(cpu::Streaming{cpu::hint_named(hint), ahead, streams});
}

std::vector<std::tuple<uintptr_t, int64_t, int64_t>> weights(const Program& program) {
  std::vector<std::tuple<uintptr_t, int64_t, int64_t>> found;
  for (const cpu::Streamed& w : program.streamed()) {
    found.emplace_back(reinterpret_cast<uintptr_t>(w.data), w.bytes, w.rows);
  }
  return found;
}

// Lets Ctrl-C end a program: the interpreter looks at signals in its main thread alone.
void look_at_signals() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void define_program(py::module_& m) {
  py::class_<Program>(m, "Program", "Instructions for slots of memory.")
      .def(py::init([](const std::vector<int64_t>& words, std::vector<int64_t> bytes,
                       std::vector<int64_t> addresses) {
             return std::make_unique<Program>(words, std::move(bytes), std::move(addresses));
           }),
           py::arg("words"), py::arg("bytes"), py::arg("addresses"),
           "The words of its instructions, the bytes of each slot, and its address, 0 where `run` "
           "gives it. Slot 0 is the program's own. ValueError for words that are no program.")
      .def(
          "run",
          [](Program& program, const std::vector<int64_t>& given) {
            program.run(given, look_at_signals);
          },
          py::arg("given"), py::call_guard<py::gil_scoped_release>(),
          "Runs it with the addresses of the slots that had none. One run at a time.")
      .def(
          "run",
          [](Program& program, const std::vector<int64_t>& places,
             const std::vector<int64_t>& given) { program.run(places, given, look_at_signals); },
          py::arg("places"), py::arg("given"), py::call_guard<py::gil_scoped_release>(),
          "The same with some addresses, by their places among them; the others are those of the "
          "run before. ValueError where there was none.")
      .def_property_readonly("work", &Program::work,
                             "Multiply-accumulates of one run, and elements where it multiplies "
                             "none.")
      .def_property_readonly("written", &Program::written, "The slots that a run writes to.")
      .def_property_readonly("weights", &weights,
                             "Of each linear: the address of its packed weight, its bytes, and the "
                             "rows that it multiplies.")
      .def("stream", &stream, py::arg("hint"), py::arg("ahead") = 0, py::arg("streams") = 1,
           "How the weights of few rows pass by from now on, as `tuning` names it; '' for what is "
           "set there. Changes no bit. ValueError for what is out of bounds. Not during a run.");
}

}  // namespace qfx
