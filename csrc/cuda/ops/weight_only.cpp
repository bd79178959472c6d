// int8_weight_linear on CUDA: float activations times int8 weights.
#include "cuda/gemv/gemv.h"
#include "cuda/ops/product.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

Tensor int8_weight_linear(Tensor x, Tensor packed, Tensor w_scale, std::optional<Tensor> bias,
                          Text activation, ScalarType out_dtype) {
  constexpr const char* op = "int8_weight_linear";
  const OnDevice device(op, x, packed, w_scale, bias);
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  const int64_t n = w_scale.numel();
  check_col_scales(op, "w_scale", w_scale, n);
  const WeightLayout layout = layout_of(op, packed, x, size.columns, n);
  check_bias(op, bias, n);
  const Activation chosen = activation_of(op, activation);
  const Dtype dtype = dtype_of(op, out_dtype);
  x = made_contiguous(x);
  packed = made_aligned(packed);
  w_scale = made_contiguous(w_scale);
  bias = made_contiguous(bias);
  const float* scales = floats(w_scale);
  const PackedWeight w = packed_of(layout, packed);
  const AnyFloats biases = bias_of(op, bias);
  Tensor y = empty_beside(x, with_last(x, n), out_dtype);
  if (y.numel() == 0) return y;
  const WeightOnly problem = {x.const_data_ptr(),
                              dtype_of(op, x.scalar_type()),
                              size.rows,
                              n,
                              size.columns,
                              w.w,
                              w.layout.pitch(),
                              scales,
                              biases,
                              chosen,
                              dtype,
                              y.mutable_data_ptr()};
  weight_linear(problem, device.multiprocessors(), device.stream());
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) {
  implement<"int8_weight_linear", &int8_weight_linear>(m);
}

}  // namespace
}  // namespace qfx::cuda
