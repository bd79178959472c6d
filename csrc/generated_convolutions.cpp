// qfx::conv_dynamic and qfx::conv_depthwise as generated code calls them.
#include <vector>

#include "call_arguments.h"
#include "cpu/ops/convolution.h"
#include "generated_calls.h"
#include "recorded_call.h"

namespace qfx {
namespace {

// The numbers that follow the tensors, in their order: those of the call, of the weight, and of the
// windows. Behind them comes the number of axes.
enum Number {
  kDepthwise,
  kHasFactor,
  kHasResidual,
  kGroups,
  kDtypeOfX,
  kDtypeOfY,
  kCode,
  kNumbers = kCode + 5
};
constexpr int64_t kMostAxes = 3;

// Takes numbers from the front.
std::vector<int64_t> taken(Numbers& numbers, int64_t count) {
  const Numbers first = numbers.first(static_cast<size_t>(count));
  numbers = numbers.subspan(static_cast<size_t>(count));
  return {first.begin(), first.end()};
}

// Of x: its shape and strides; then those of WindowArguments.
void take_windows(const char* op, Numbers numbers, int64_t axes, cpu::ConvolutionAt* call) {
  const std::vector<int64_t> shape = taken(numbers, axes + 2), strides = taken(numbers, axes + 2);
  cpu::WindowArguments how;
  how.kernel = taken(numbers, axes);
  how.stride = taken(numbers, axes);
  how.padding = taken(numbers, 2 * axes);
  how.dilation = taken(numbers, axes);
  call->of = windows_of(op, shape, how, call->groups);
  call->x = cpu::image_at(call->x.data, call->x.dtype, strides);
}

// The tensors: x, the weight, its bias where it has one, the factor and the residual if there are
// such.
void call_convolution(PyObject* const* arguments, Py_ssize_t count) {
  const int64_t axes = last_number(arguments, count), of_windows = 7 * axes + 4;
  const int64_t size = kNumbers + kWeightNumbers + of_windows + 1, tensors = count - size;
  if (axes < 1 || axes > kMostAxes || tensors < 2) {
    throw std::invalid_argument("convolution: arguments are missing");
  }
  const std::vector<int64_t> all = numbers_of(arguments + tensors, static_cast<size_t>(size));
  const Numbers numbers = all;
  const bool depthwise = numbers[kDepthwise] != 0;
  const char* op = depthwise ? "conv_depthwise" : "conv_dynamic";
  Operands from(op, arguments, tensors);
  cpu::ConvolutionAt call = {};
  call.x.data = from.take<const char>();
  call.x.dtype = dtype_at(op, numbers[kDtypeOfX]);
  call.groups = numbers[kGroups];
  call.weight = weight_of(op, from, numbers.subspan(kNumbers));
  if (numbers[kHasFactor] != 0) call.factor = from.take<const float>();
  if (numbers[kHasResidual] != 0) call.residual = from.take<const void>();
  from.finish();
  call.code = activation_code_of(op, numbers.subspan(kCode, 5));
  call.out_dtype = dtype_at(op, numbers[kDtypeOfY]);
  take_windows(op, numbers.subspan(kNumbers + kWeightNumbers, of_windows), axes, &call);
  call.y = data_of<void>(arguments[count]);
  const pybind11::gil_scoped_release released;
  const RecordedCall recorded(depthwise ? "qfx::conv_depthwise" : "qfx::conv_dynamic");
  if (depthwise) return depthwise_at(op, call);
  convolution_at(op, call);
}

PyObject* convolution(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count,
                      PyObject* names) {
  return answered("convolution", arguments, count, names, call_convolution);
}

}  // namespace

void define_generated_convolutions(pybind11::module_& m) {
  static PyMethodDef method = {
      "convolution", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&convolution)),
      METH_FASTCALL | METH_KEYWORDS,
      "qfx::conv_dynamic and qfx::conv_depthwise, as compiled graphs call them: addresses are "
      "taken from tensors unchecked."};
  define_call(m, &method);
}

}  // namespace qfx
