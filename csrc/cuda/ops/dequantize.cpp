// dequantize on CUDA.
#include "cuda/rows/dequantize.h"

#include <algorithm>

#include "cuda/ops/arguments.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

Tensor dequantize(Tensor q, Tensor scale, std::optional<Tensor> zero_point,
                  std::optional<Tensor> col_scale, std::optional<Tensor> bias, Text activation,
                  ScalarType out_dtype) {
  constexpr const char* op = "dequantize";
  const OnDevice device(op, q, scale, zero_point, col_scale, bias);
  check_dtype(op, "q", q, {ScalarType::Char, ScalarType::Int});
  check_dtype(op, "scale", scale, {ScalarType::Float});
  const Matrix size = matrix_of(op, "q", q);
  check_per_row(op, "scale", scale, size.rows);
  if (zero_point.has_value()) {
    check_dtype(op, "zero_point", *zero_point, {ScalarType::Int});
    STD_TORCH_CHECK(zero_point->numel() == scale.numel(), op, ": zero_point has ",
                    zero_point->numel(), " elements but scale has ", scale.numel());
  }
  if (col_scale.has_value()) check_col_scale(op, *col_scale, q);
  if (bias.has_value()) {
    check_float(op, "bias", *bias);
    check_vector(op, "bias", *bias, size.columns);
  }
  const Dtype dtype = dtype_of(op, out_dtype);
  const Activation chosen = activation_of(op, activation);
  q = made_contiguous(q);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  col_scale = made_contiguous(col_scale);
  bias = made_contiguous(bias);
  Dequantize job = {};
  job.q = q.const_data_ptr();
  job.codes = q.scalar_type() == ScalarType::Char;
  job.rows = size.rows;
  job.columns = size.columns;
  job.scale = floats(scale);
  job.scale_step = job.zero_step = stride_of(scale);
  if (zero_point.has_value()) job.zero_point = ints(*zero_point);
  job.rows_a_scale = std::max<int64_t>(size.rows, 1);
  if (col_scale.has_value()) {
    job.col_scale = floats(*col_scale);
    if (col_scale->dim() > 1) job.rows_a_scale = std::max<int64_t>(q.size(q.dim() - 2), 1);
  }
  if (bias.has_value()) {
    job.bias = bias->const_data_ptr();
    job.bias_dtype = dtype_of(op, bias->scalar_type());
  }
  Tensor y = empty_beside(q, with_last(q, size.columns), out_dtype);
  dequantize(job, chosen, dtype, y.mutable_data_ptr(), device.stream());
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) { implement<"dequantize", &dequantize>(m); }

}  // namespace
}  // namespace qfx::cuda
