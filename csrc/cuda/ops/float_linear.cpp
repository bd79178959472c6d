#include "cuda/ops/float_linear.h"

namespace qfx::cuda {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

// Holds the arguments, then the results.
template <size_t kCount>
using Stack = std::array<StableIValue, kCount>;

// Across torch's C interface comes no reason for a failure; torch prints it.
template <size_t kCount>
void call(const char* op, const char* name, Stack<kCount>& stack) {
  const AOTITorchError error = torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION);
  STD_TORCH_CHECK(error == TORCH_SUCCESS, op, ": ", name,
                  " failed, which is Python on CUDA (qfx/ops/cuda_float_linear.py); its error is "
                  "printed above");
}

std::vector<int64_t> values_of(const WeightLayoutArgument& layout) {
  return {layout.n, layout.bits, layout.group, layout.scale_group, layout.shift};
}

}  // namespace

Tensor low_bit_pack(const char* op, const Tensor& codes, const Tensor& scale,
                    const std::optional<Tensor>& zero_point, const std::optional<Tensor>& minimum,
                    int64_t bits, int64_t group) {
  Stack<6> stack = {from(codes),   from(scale), from(zero_point),
                    from(minimum), from(bits),  from(group)};
  call(op, "qfx::low_bit_pack", stack);
  return to<Tensor>(stack[0]);
}

std::array<Tensor, 4> low_bit_unpack(const char* op, const Tensor& weight,
                                     const WeightLayoutArgument& layout, int64_t k) {
  Stack<4> stack = {from(weight), from(values_of(layout)), from(k)};
  call(op, "qfx::low_bit_unpack", stack);
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2]), to<Tensor>(stack[3])};
}

Tensor value_linear(const char* op, const Tensor& x, const Tensor& values,
                    const std::optional<Tensor>& bias, const std::string& activation,
                    ScalarType out_dtype) {
  Stack<5> stack = {from(x), from(values), from(bias), from(activation), from(out_dtype)};
  call(op, "qfx::value_linear", stack);
  return to<Tensor>(stack[0]);
}

Tensor weight_only_linear(const char* op, const Tensor& x, const Tensor& weight,
                          const WeightLayout& layout, const std::optional<Tensor>& bias,
                          const std::string& activation, ScalarType out_dtype) {
  const std::vector<int64_t> places = {layout.weights_at(), layout.pitch(), layout.scale_at()};
  Stack<7> stack = {from(x),    from(weight),     from(layout.n), from(places),
                    from(bias), from(activation), from(out_dtype)};
  call(op, "qfx::weight_only_linear", stack);
  return to<Tensor>(stack[0]);
}

}  // namespace qfx::cuda
