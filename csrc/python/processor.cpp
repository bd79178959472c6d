// qfx._C: the processor, its kernels, and what they have counted.
#include "python/convert.h"
#include "python/parts.h"

namespace qfx::python {
namespace {

Object isa() {
  const char* name = nullptr;
  check(qfx_api_isa(&name));
  return object_of(std::string(name));
}

Object isas() { return texts_of(rows_of(qfx_api_isas)); }

Object set_isa(PyObject*, PyObject* args, PyObject* named) {
  const char* name = nullptr;
  read_arguments(args, named, "s:set_isa", {"name"}, &name);
  check(qfx_api_set_isa(name));
  return none();
}

Object kernel_for(PyObject*, PyObject* args, PyObject* named) {
  int64_t rows = 0, bits = 8, w_bits = 8;
  read_arguments(args, named, "L|LL:kernel_for", {"rows", "bits", "w_bits"}, &rows, &bits, &w_bits);
  const auto found = rows_of(
      [&](QfxTake take, void* to) { return qfx_api_kernel_for(rows, bits, w_bits, take, to); });
  return object_of(found.at(0).texts.at(0));
}

Object multiply(PyObject*, PyObject* args, PyObject* named) {
  int64_t rounds = 0, bits = 8, w_bits = 8, products = 0;
  read_arguments(args, named, "L|LL:multiply", {"rounds", "bits", "w_bits"}, &rounds, &bits,
                 &w_bits);
  check(qfx_api_multiply(rounds, bits, w_bits, &products));
  return object_of(products);
}

Object kernels() {
  std::vector<Object> rows;
  for (const ResultRow& row : rows_of(qfx_api_kernels)) {
    Object dict = Object::taken(PyDict_New());
    set_item(dict, "name", object_of(row.texts.at(0)));
    set_item(dict, "isa", object_of(row.texts.at(1)));
    set_item(dict, "mr", object_of(row.numbers.at(0)));
    set_item(dict, "nr", object_of(row.numbers.at(1)));
    set_item(dict, "supported", object_of(row.numbers.at(2) != 0));
    rows.push_back(std::move(dict));
  }
  return list_of(std::move(rows));
}

Object cuda_architectures() { return texts_of(rows_of(qfx_api_cuda_architectures)); }

Object cuda_packed_size(PyObject*, PyObject* args, PyObject* named) {
  PyObject* layout = nullptr;
  int64_t k = 0, bytes = 0;
  read_arguments(args, named, "OL:cuda_packed_size", {"layout", "k"}, &layout, &k);
  const std::vector<int64_t> numbers = integers_of(layout);
  const auto count = static_cast<int64_t>(numbers.size());
  check(qfx_api_cuda_packed_size(numbers.data(), count, k, &bytes));
  return object_of(bytes);
}

Object read_packed_again() {
  qfx_api_read_packed_again();
  return none();
}

Object guard_counts() {
  Object dict = Object::taken(PyDict_New());
  for (const ResultRow& row : rows_of(qfx_api_guard_counts)) {
    set_item(dict, row.texts.at(0).c_str(), tuple_of(row.numbers));
  }
  return dict;
}

Object take_guard_counts(PyObject*, PyObject* args, PyObject* named) {
  const char* site = nullptr;
  int64_t counts[4] = {};
  read_arguments(args, named, "s:take_guard_counts", {"site"}, &site);
  check(qfx_api_take_guard_counts(site, counts));
  return tuple_of({counts, counts + 4});
}

PyMethodDef methods[] = {
    method<isa>("isa", "isa()\n--\n\nThe instruction set the kernels run on."),
    method<isas>("isas", "isas()\n--\n\nThe instruction sets of this machine, best first."),
    method<set_isa>("set_isa",
                    "set_isa(name)\n--\n\nRuns the kernels on another instruction set of this "
                    "machine; ValueError "
                    "if it has none."),
    method<kernel_for>(
        "kernel_for",
        "kernel_for(rows, bits=8, w_bits=8)\n--\n\nName of the GEMM kernel that this many rows of "
        "codes of these bits run on."),
    method<multiply>("multiply",
                     "multiply(rounds, bits=8, w_bits=8)\n--\n\nRuns the multiply instructions "
                     "alone; returns how "
                     "many multiply-accumulates they made."),
    method<kernels>(
        "kernels",
        "kernels()\n--\n\nThe GEMM micro-kernels of this build: dicts of name, isa, mr, nr, "
        "supported."),
    method<cuda_architectures>("cuda_architectures",
                               "cuda_architectures()\n--\n\nThe architectures of GPUs that this "
                               "build has kernels for; none "
                               "without CUDA."),
    method<cuda_packed_size>(
        "cuda_packed_size",
        "cuda_packed_size(layout, k)\n--\n\nBytes of a packed weight of 8 bits on CUDA."),
    method<read_packed_again>(
        "read_packed_again",
        "read_packed_again()\n--\n\nHas every packed weight compared with its checksum at its next "
        "use, as at its first."),
    method<guard_counts>(
        "guard_counts",
        "guard_counts()\n--\n\nBy site: calls, rows, calls with rows in float, rows in float, of "
        "linear_guarded."),
    method<take_guard_counts>(
        "take_guard_counts",
        "take_guard_counts(site)\n--\n\nThe counts of one site, which then has none."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_processor(PyObject* module) {
  add_functions(module, methods);
  Object activations = texts_of(rows_of(qfx_api_activations));
  if (PyModule_AddObject(module, "activations", activations.get()) != 0) throw Raised();
  activations.release();
}

}  // namespace qfx::python
