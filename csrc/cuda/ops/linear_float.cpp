// linear_float on CUDA: float activations times a quantized weight.
#include "cuda/gemv/gemv.h"
#include "cuda/ops/float_linear.h"
#include "cuda/ops/lowbit_linear.h"
#include "cuda/ops/product.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

// The rows of x up to which the kernel that reads the weight once for all of them is used. More
// rows would read it again, and multiply without tensor cores.
constexpr int64_t kFewRows = 8;

Tensor linear_float(Tensor x, Tensor weight, std::vector<int64_t> given, std::optional<Tensor> bias,
                    Text activation, ScalarType out_dtype) {
  constexpr const char* op = "linear_float";
  const OnDevice device(op, x, weight, bias);
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  const WeightLayoutArgument layout = layout_argument_of(op, given);
  check_bias(op, bias, layout.n);
  const Activation chosen = activation_of(op, activation);
  const Dtype dtype = dtype_of(op, out_dtype);
  if (is_low_bit(layout)) {
    return low_bit_linear(op, device, x, weight, layout, bias, activation, out_dtype);
  }
  check_one_scale(op, layout);
  const WeightLayout bytes = weight_layout_of(op, weight, layout, size.columns);
  weight = made_aligned(weight);
  if (size.rows > kFewRows) {
    return weight_only_linear(op, x, weight, bytes, bias, activation, out_dtype);
  }
  x = made_contiguous(x);
  bias = made_contiguous(bias);
  const PackedWeight w = packed_of(bytes, weight);
  const AnyFloats biases = bias_of(op, bias);
  Tensor y = empty_beside(x, with_last(x, layout.n), out_dtype);
  if (y.numel() == 0) return y;
  const WeightOnly problem = {x.const_data_ptr(),
                              dtype_of(op, x.scalar_type()),
                              size.rows,
                              layout.n,
                              size.columns,
                              w.w,
                              w.layout.pitch(),
                              w.scale,
                              biases,
                              chosen,
                              dtype,
                              y.mutable_data_ptr()};
  weight_linear(problem, device.multiprocessors(), device.stream());
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) { implement<"linear_float", &linear_float>(m); }

}  // namespace
}  // namespace qfx::cuda
