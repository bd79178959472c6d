// int8_bmm, int8_bmm_dynamic on CUDA: products of two computed operands.
#include "batch.h"
#include "cuda/gemm/copy_rows.h"
#include "cuda/ops/product.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

// sum_k b[b][n][k] for each row of the operand that takes the weight's place.
Tensor row_sums_of(const OwnedRows& b, const BatchSizes& size, Stream stream) {
  Tensor sums = empty_beside(b.memory, {size.batch, size.n}, ScalarType::Int);
  sum_codes({b.rows.data, b.rows.batch_step, b.rows.pitch},
            {size.batch, size.n, size.k, round_up(size.k, kPitch)}, data_of<int32_t>(sums), stream);
  return sums;
}

Sizes sizes_for(const BatchSizes& size) {
  return {size.batch, size.m, size.n, round_up(size.k, kPitch)};
}

Tensor int8_bmm(Tensor a_q, Tensor a_zero_point, Tensor b_q) {
  constexpr const char* op = "int8_bmm";
  const OnDevice device(op, a_q, a_zero_point, b_q);
  check_dtype(op, "a_q", a_q, {ScalarType::Char});
  check_dtype(op, "b_q", b_q, {ScalarType::Char});
  const BatchSizes size = batch_sizes_of(op, "a_q", a_q, "b_q", b_q);
  check_zero_points(op, "a_zero_point", a_zero_point, size.batch * size.m);
  a_zero_point = made_contiguous(a_zero_point);
  const PerRow<int32_t> zero = zero_points_of(a_zero_point);
  Tensor acc = empty_beside(a_q, with_last(a_q, size.n), ScalarType::Int);
  if (acc.numel() == 0) return acc;
  Output out = {};
  out.type = OutType::kIntegers;
  out.data = acc.mutable_data_ptr();
  const OwnedRows a = rows_of_matrices(a_q, device.stream());
  const OwnedRows b = rows_of_matrices(b_q, device.stream());
  const Tensor sums = row_sums_of(b, size, device.stream());
  run_product(device, acc, sizes_for(size), a.rows, b.rows, {zero, ints(sums), size.n}, out);
  return acc;
}

Tensor int8_bmm_dynamic(Tensor a, Tensor b, std::vector<int64_t> axes, int64_t bits, bool symmetric,
                        int64_t b_bits, ScalarType out_dtype) {
  constexpr const char* op = "int8_bmm_dynamic";
  const OnDevice device(op, a, b);
  check_float(op, "a", a);
  check_float(op, "b", b);
  const BatchSizes size = batch_sizes_of(op, "a", a, "b", b);
  const CodeSpec spec = code_spec_of(op, axes, bits, symmetric);
  const CodeSpec b_spec = code_spec_of(op, {1}, b_bits, true);
  Output out = {};
  out.dtype = dtype_of(op, out_dtype);
  Tensor y = empty_beside(a, with_last(a, size.n), out_dtype);
  if (y.numel() == 0) return y;
  const QuantizedRows a_codes = quantized_rows(op, a, spec, device.stream());
  const QuantizedRows b_codes = quantized_rows(op, b, b_spec, device.stream());
  out.data = y.mutable_data_ptr();
  out.row_scale = {floats(a_codes.scale), stride_of(a_codes.scale)};
  out.col_scale = floats(b_codes.scale);
  out.col_step = size.n;
  const PerRow<int32_t> zero = {ints(a_codes.zero_point), stride_of(a_codes.zero_point)};
  const OwnedRows a_rows = rows_of_matrices(a_codes.q, device.stream());
  const OwnedRows b_rows = rows_of_matrices(b_codes.q, device.stream());
  const Tensor sums = row_sums_of(b_rows, size, device.stream());
  run_product(device, y, sizes_for(size), a_rows.rows, b_rows.rows, {zero, ints(sums), size.n},
              out);
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) {
  implement<"int8_bmm", &int8_bmm>(m);
  implement<"int8_bmm_dynamic", &int8_bmm_dynamic>(m);
}

}  // namespace
}  // namespace qfx::cuda
