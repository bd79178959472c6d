#include "generated_calls.h"

#include <vector>

#include "call_arguments.h"
#include "recorded_call.h"

namespace qfx {
namespace {

// The numbers that follow the tensors, in their order: those of the call, and then of each weight.
enum Number { kHasFactor, kRows, kK, kDtypeOfX, kDtypeOfY, kCode, kNumbers = kCode + 5 };
constexpr int64_t kMostWeights = 64;

// The operator of so many weights, for errors and profilers.
const char* operator_of(int64_t weights) { return weights == 1 ? "linear_dynamic" : "linears"; }

// The tensors: x, then each weight and its bias where it has one, then the factor if there is one.
// The number of weights comes last, and says how many numbers come before it.
void call_linears(PyObject* const* arguments, Py_ssize_t count) {
  const int64_t weights = last_number(arguments, count);
  const int64_t size = kNumbers + weights * kWeightNumbers + 1, tensors = count - size;
  if (weights < 1 || weights > kMostWeights || tensors < 2) {
    throw std::invalid_argument("linears: arguments are missing");
  }
  const char* op = operator_of(weights);
  const std::vector<int64_t> all = numbers_of(arguments + tensors, static_cast<size_t>(size));
  const Numbers numbers = all;
  Operands from(op, arguments, tensors);
  cpu::LinearsAt call = {};
  call.x = from.take<const void>();
  call.dtype = dtype_at(op, numbers[kDtypeOfX]);
  call.rows = numbers[kRows];
  call.k = numbers[kK];
  call.code = activation_code_of(op, numbers.subspan(kCode, 5));
  call.out_dtype = dtype_at(op, numbers[kDtypeOfY]);
  std::vector<cpu::LinearWeightAt> each;
  for (int64_t i = 0; i < weights; ++i) {
    each.push_back(weight_of(op, from, numbers.subspan(kNumbers + i * kWeightNumbers)));
  }
  if (numbers[kHasFactor] != 0) call.factor = from.take<const float>();
  from.finish();
  call.y = data_of<void>(arguments[count]);
  const pybind11::gil_scoped_release released;
  const RecordedCall recorded(weights == 1 ? "qfx::linear_dynamic" : "qfx::linears");
  linears_at(op, call, each);
}

PyObject* linears(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count,
                  PyObject* names) {
  return answered("linears", arguments, count, names, call_linears);
}

}  // namespace

void define_generated_calls(pybind11::module_& m) {
  static PyMethodDef method = {
      "linears", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&linears)),
      METH_FASTCALL | METH_KEYWORDS,
      "qfx::linears, and qfx::linear_dynamic as one of them, as compiled graphs call them: "
      "addresses are taken from tensors unchecked. The outputs lie one after the other in `out`."};
  define_call(m, &method);
  define_generated_convolutions(m);
}

}  // namespace qfx
