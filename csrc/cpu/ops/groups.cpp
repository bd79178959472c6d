// int8_linear_groups on the CPU: a linear whose weight has a scale for each group of K.
#include "cpu/gemm/group_product.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/arguments.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

// An int32 sum of this many products of two codes less their zero points, both in [-255, 255].
constexpr int64_t kMaxGroup = 33025;

void check_groups(const char* op, const char* what, const Tensor& t, const PackedWeight& w) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == w.n && t.size(1) == w.groups(), op, ": ", what,
                  " has shape ", shape_of(t), ", expected ", w.n, "x", w.groups(),
                  ": a column for each group of ", w.group, " of the K=", w.k,
                  " that the weight was packed for");
}

template <typename T>
GroupValues<T> values_of(const Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), t.stride(0), t.stride(1)};
}

Tensor int8_linear_groups(Tensor q, Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale,
                          std::optional<Tensor> w_zero, std::optional<Tensor> bias, Text activation,
                          ScalarType out_dtype) {
  constexpr const char* op = "int8_linear_groups";
  check_dtype(op, "q", q, {ScalarType::Char});
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_dtype(op, "w_scale", w_scale, {ScalarType::Float});
  STD_TORCH_CHECK(w_scale.dim() == 2, op, ": w_scale has shape ", shape_of(w_scale),
                  ", expected [N, G], a scale for each output feature and group of K");
  const Matrix size = matrix_of(op, "q", q);
  check_per_row(op, "scale", scale, size.rows);
  check_zero_point(op, zero_point, size.rows);
  packed = made_contiguous(packed);
  const PackedWeight w = packed_of(op, packed, q, size.columns, w_scale.size(0));
  check_groups(op, "w_scale", w_scale, w);
  GroupedWeight weight = {w, values_of<float>(w_scale), {nullptr, 0, 0}};
  if (w_zero.has_value()) {
    check_dtype(op, "w_zero", *w_zero, {ScalarType::Int});
    check_groups(op, "w_zero", *w_zero, w);
    const int64_t longest = std::min(w.group, w.k);
    STD_TORCH_CHECK(longest <= kMaxGroup, op, ": a group of ", longest,
                    " with zero points is above ", kMaxGroup,
                    ", where its int32 sum could overflow; pack the weight in groups");
    weight.zero = values_of<int32_t>(*w_zero);
  }
  FloatOutput to = {nullptr, bias_of(op, bias, w.n), activation_of(op, activation),
                    dtype_of(op, out_dtype), nullptr};
  q = made_contiguous(q);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  Tensor y = empty_on_cpu(with_last(q, w.n), out_dtype);
  if (y.numel() == 0) return y;  // of rows without number, perhaps
  to.data = static_cast<char*>(y.mutable_data_ptr());
  const Kernels& kernels = kernels_of(current_isa());
  const int8_t* codes = static_cast<const int8_t*>(q.const_data_ptr());
  const int64_t step = stride_of(zero_point);
  in_chunks(kernels, w, size.rows, [&](int64_t first, int64_t count) {
    const int32_t* zeros = ints(zero_point) + first * step;
    const GroupedRows rows(kernels, w, codes + first * w.k, zeros, step, count);
    grouped_linear(kernels, rows, weight, to, floats(scale), stride_of(scale), first);
  });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) { implement<"int8_linear_groups", &int8_linear_groups>(m); }

}  // namespace
}  // namespace qfx::cpu
