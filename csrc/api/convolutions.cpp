// qfx::conv_dynamic and qfx::conv_depthwise as generated code calls them.
#include <vector>

#include "api/api.h"
#include "api/call_arguments.h"
#include "api/recorded_call.h"
#include "cpu/ops/convolution.h"

namespace qfx {
namespace {

// The numbers in their order: those of the call, of the weight, and of the windows.
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
constexpr int64_t kFirstOfWindows = int64_t{kNumbers} + int64_t{kWeightNumbers};
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
// such. The number of axes comes last.
void call_convolution(std::span<const void* const> tensors, Numbers numbers, void* y) {
  const int64_t axes = numbers.empty() ? 0 : numbers.back(), of_windows = 7 * axes + 4;
  const bool plausible = axes >= 1 && axes <= kMostAxes && tensors.size() >= 2;
  if (!plausible || static_cast<int64_t>(numbers.size()) != kFirstOfWindows + of_windows + 1) {
    throw std::invalid_argument("convolution: arguments are missing");
  }
  const bool depthwise = numbers[kDepthwise] != 0;
  const char* op = depthwise ? "conv_depthwise" : "conv_dynamic";
  TensorsOfCall from(op, tensors);
  cpu::ConvolutionAt call = {};
  call.x.data = from.take<char>();
  call.x.dtype = dtype_at(op, numbers[kDtypeOfX]);
  call.groups = numbers[kGroups];
  call.weight = weight_of(op, from, numbers.subspan(kNumbers));
  if (numbers[kHasFactor] != 0) call.factor = from.take<float>();
  if (numbers[kHasResidual] != 0) call.residual = from.take<void>();
  from.finish();
  call.code = activation_code_of(op, numbers.subspan(kCode, 5));
  call.out_dtype = dtype_at(op, numbers[kDtypeOfY]);
  take_windows(op, numbers.subspan(kFirstOfWindows, of_windows), axes, &call);
  call.y = y;
  const RecordedCall recorded(depthwise ? "qfx::conv_depthwise" : "qfx::conv_dynamic");
  if (depthwise) return cpu::depthwise_at(op, call);
  cpu::convolution_at(op, call);
}

}  // namespace
}  // namespace qfx

QfxStatus qfx_api_convolution(const void* const* tensors, int64_t tensor_count,
                              const int64_t* numbers, int64_t count, void* y) {
  return qfx::answer_call("convolution", [&] {
    qfx::call_convolution({tensors, static_cast<size_t>(tensor_count)},
                          {numbers, static_cast<size_t>(count)}, y);
  });
}
