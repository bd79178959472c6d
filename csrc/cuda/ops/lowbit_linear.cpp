#include "cuda/ops/lowbit_linear.h"

#include "cuda/gemv/lowbit.h"
#include "cuda/ops/float_linear.h"
#include "cuda/ops/product.h"

namespace qfx::cuda {
namespace {

// Only the header says whether shifts are zero points or minimums, but the size says how many bytes
// they take.
LowbitWeight lowbit_weight_of(const char* op, const Tensor& weight,
                              const WeightLayoutArgument& layout, int64_t k) {
  STD_TORCH_CHECK(layout.bits == 4 || layout.bits == 5, op, ": bits=", layout.bits,
                  ", expected 4, 5 or 8");
  STD_TORCH_CHECK(layout.group == 32 || layout.group == 64 || layout.group == 128, op,
                  ": group=", layout.group, ", expected 32, 64 or 128 with bits=", layout.bits);
  check_dtype(op, "the packed weight", weight, {ScalarType::Char});
  const auto of = [&](int shift_bytes) {
    return LowbitWeight::of(weight.const_data_ptr(), layout.n, k, layout.bits, layout.group,
                            shift_bytes);
  };
  LowbitWeight w = of(layout.shift ? 1 : 0);
  const int64_t least = w.size();
  if (layout.shift && weight.numel() != least) w = of(2);
  STD_TORCH_CHECK(weight.dim() == 1 && weight.numel() == w.size(), op, ": the packed weight has ",
                  weight.numel(), " bytes, but one of n=", layout.n, ", bits=", layout.bits,
                  ", group=", layout.group, ", shift=", layout.shift, " for K=", k, " has ", least,
                  layout.shift ? " or, with minimums, " + std::to_string(w.size()) : "");
  return w;
}

// w^ [N, K] in the dtype of x.
Tensor values_of(const OnDevice& device, const Tensor& x, Dtype x_dtype, const LowbitWeight& w,
                 int64_t k) {
  Tensor values = empty_beside(x, {w.n, k}, x.scalar_type());
  lowbit_values(w, k, x_dtype, values.mutable_data_ptr(), device.stream());
  return values;
}

}  // namespace

Tensor low_bit_linear(const char* op, const OnDevice& device, const Tensor& x, const Tensor& weight,
                      const WeightLayoutArgument& layout, const std::optional<Tensor>& bias,
                      const std::string& activation, ScalarType out_dtype) {
  const Matrix size = matrix_of(op, "x", x);
  const Tensor bytes = made_aligned(weight);
  const LowbitWeight w = lowbit_weight_of(op, bytes, layout, size.columns);
  const Dtype x_dtype = dtype_of(op, x.scalar_type());
  if (!has_lowbit_kernel(x_dtype, size.rows, device.gpu().capability)) {
    const Tensor values = values_of(device, x, x_dtype, w, size.columns);
    return value_linear(op, x, values, bias, activation, out_dtype);
  }
  const Tensor rows = made_aligned(x);
  const std::optional<Tensor> whole_bias = made_contiguous(bias);
  Tensor y = empty_beside(x, with_last(x, layout.n), out_dtype);
  if (y.numel() == 0) return y;
  const LowbitOnly problem = {rows.const_data_ptr(),
                              x_dtype,
                              size.rows,
                              layout.n,
                              size.columns,
                              w,
                              bias_of(op, whole_bias),
                              activation_of(op, activation),
                              dtype_of(op, out_dtype),
                              y.mutable_data_ptr()};
  lowbit_linear(problem, device.multiprocessors(), device.stream());
  return y;
}

}  // namespace qfx::cuda
