// Operators as packages of AOTInductor call them: C functions, so that neither the dispatcher nor
// autograd's kernels in Python run. A package finds them by name among the symbols of the process.
// Names and arguments follow from the operators' schemas (qfx/host/inductor_packages.py).
#include <array>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "api/recorded_call.h"
#include "cpu/ops/linear.h"
#include "implement.h"

namespace qfx {
namespace {

constexpr const char* kOp = "linear_dynamic";

// Another handle of a tensor that the package keeps.
Tensor shared(AtenTensorHandle tensor) {
  AtenTensorHandle copy = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &copy));
  return Tensor(copy);
}

std::optional<Tensor> shared(const AtenTensorHandle* tensor) {
  return tensor == nullptr ? std::nullopt : std::optional(shared(*tensor));
}

AtenTensorHandle released(const Tensor& tensor) {
  AtenTensorHandle copy = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &copy));
  return copy;
}

// The arguments of linear_dynamic in their order.
struct LinearCall {
  AtenTensorHandle x, weight;
  std::span<const int64_t> layout;
  const AtenTensorHandle* bias;
  std::span<const int64_t> code;
  const char* activation;
  ScalarType out_dtype;
  const AtenTensorHandle* factor;
};

Tensor run_on_cpu(const LinearCall& call) {
  const RecordedCall recorded("qfx::linear_dynamic");
  return cpu::linear_of_floats(kOp, shared(call.x),
                               {shared(call.weight),
                                {call.layout.begin(), call.layout.end()},
                                shared(call.bias),
                                activation_code_of(kOp, call.code),
                                call.activation,
                                call.out_dtype,
                                shared(call.factor)},
                               false)
      .y;
}

Tensor dispatch(const LinearCall& call) {
  using torch::stable::detail::from;
  const std::vector<int64_t> layout(call.layout.begin(), call.layout.end());
  const std::vector<int64_t> code(call.code.begin(), call.code.end());
  std::array<StableIValue, 8> stack{from(shared(call.x)), from(shared(call.weight)),
                                    from(layout),         from(shared(call.bias)),
                                    from(code),           from(std::string(call.activation)),
                                    from(call.out_dtype), from(shared(call.factor))};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("qfx::linear_dynamic", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor run(const LinearCall& call) {
  return shared(call.x).is_cpu() ? run_on_cpu(call) : dispatch(call);
}

}  // namespace

// An error is an exception, which the package passes on with its text.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_linear_dynamic(
    AtenTensorHandle x, AtenTensorHandle weight, const int64_t* layout, int64_t layout_size,
    const AtenTensorHandle* bias, const int64_t* code, int64_t code_size, const char* activation,
    int32_t out_dtype, const AtenTensorHandle* factor, AtenTensorHandle* y) {
  *y = released(Named<"linear_dynamic", &run>::run({x,
                                                    weight,
                                                    {layout, static_cast<size_t>(layout_size)},
                                                    bias,
                                                    {code, static_cast<size_t>(code_size)},
                                                    activation,
                                                    static_cast<ScalarType>(out_dtype),
                                                    factor}));
  return AOTI_TORCH_SUCCESS;
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cuda_linear_dynamic(
    AtenTensorHandle x, AtenTensorHandle weight, const int64_t* layout, int64_t layout_size,
    const AtenTensorHandle* bias, const int64_t* code, int64_t code_size, const char* activation,
    int32_t out_dtype, const AtenTensorHandle* factor, AtenTensorHandle* y) {
  return aoti_torch_cpu_linear_dynamic(x, weight, layout, layout_size, bias, code, code_size,
                                       activation, out_dtype, factor, y);
}

}  // namespace qfx
