#include "cuda/ops/arguments.h"

#include <algorithm>
#include <string>

#include "cuda/gemm/copy_rows.h"

namespace qfx::cuda {
namespace {

std::string text_of(const WeightLayoutArgument& layout) {
  std::string text;
  for (int64_t value : {layout.n, layout.bits, layout.group, layout.scale_group, layout.shift}) {
    text += (text.empty() ? "[" : ", ") + std::to_string(value);
  }
  return text + "]";
}

}  // namespace

FloatRows float_rows_of(const char* op, const Tensor& x, const Matrix& size,
                        const std::optional<Tensor>& factor, int64_t rotation) {
  const Transform transform = transform_of(factor, rotation);
  return {x.const_data_ptr(), dtype_of(op, x.scalar_type()), size.rows, size.columns, transform};
}

ActivationCode row_code_of(const char* op, const std::vector<int64_t>& given) {
  const ActivationCode code = activation_code_of(op, given);
  STD_TORCH_CHECK(code.group == 0, op, ": x has a scale for each ", code.group,
                  " elements of K, which has no kernel on CUDA, where a row has one");
  return code;
}

void check_one_scale(const char* op, const WeightLayoutArgument& layout) {
  STD_TORCH_CHECK(layout.one_scale(), op, ": the weight has the layout ", text_of(layout),
                  ", expected ", text_of(int8_rows(layout.n)),
                  ": int8 codes with one scale for each row and no zero points");
}

void check_sums(const char* op, const WeightLayout& layout) {
  const int64_t longest = layout.group == 0 ? layout.k : std::min(layout.group, layout.k);
  STD_TORCH_CHECK(!layout.shift || longest <= kMaxGroup, op, ": a group of ", longest,
                  " with zero points is above ", kMaxGroup,
                  ", where its int32 sum could overflow; pack the weight in groups");
}

WeightLayout weight_layout_of(const char* op, const Tensor& weight,
                              const WeightLayoutArgument& layout, int64_t k) {
  STD_TORCH_CHECK(layout.group >= 0 && layout.group % kCudaGroupMultiple == 0, op,
                  ": group=", layout.group, ", expected 0 (all of K) or a multiple of ",
                  kCudaGroupMultiple);
  check_dtype(op, "the packed weight", weight, {ScalarType::Char});
  STD_TORCH_CHECK(weight.dim() == 1, op, ": the packed weight has shape ", shape_of(weight),
                  ", pack_weight returns one dimension");
  const WeightLayout found =
      WeightLayout::of(layout.n, k, layout.group, layout.scale_group, layout.shift);
  STD_TORCH_CHECK(weight.numel() == found.bytes(), op, ": the packed weight has ", weight.numel(),
                  " bytes, but one of the layout ", text_of(layout), " for K=", k, " has ",
                  found.bytes());
  check_sums(op, found);
  return found;
}

PackedWeight packed_of(const WeightLayout& layout, const Tensor& weight) {
  return {layout, static_cast<const int8_t*>(weight.const_data_ptr())};
}

Tensor made_rows(const char* op, const Tensor& x, Stream stream) {
  const bool transposed = x.dim() == 2 && x.stride(0) == 1 && x.stride(1) > 1;
  if (!transposed || x.is_contiguous()) return made_contiguous(x);
  Tensor rows = empty_beside(x, {x.size(0), x.size(1)}, x.scalar_type());
  turn_floats(x.const_data_ptr(), dtype_of(op, x.scalar_type()), x.stride(1), x.size(0), x.size(1),
              rows.mutable_data_ptr(), stream);
  return rows;
}

Tensor made_aligned(const Tensor& t) {
  const Tensor contiguous = made_contiguous(t);
  const bool aligned = reinterpret_cast<uintptr_t>(contiguous.const_data_ptr()) % 16 == 0;
  if (aligned) return contiguous;
  const std::vector<int64_t> shape(t.sizes().begin(), t.sizes().end());
  return allocated(shape, t.scalar_type(), [&] { return torch::stable::clone(contiguous); });
}

Tensor empty_beside(const Tensor& t, const std::vector<int64_t>& shape, ScalarType dtype) {
  return allocated(shape, dtype, [&] {
    return torch::stable::new_empty(t, {shape.data(), shape.size()}, dtype);
  });
}

Tensor zeros_beside(const Tensor& t, const std::vector<int64_t>& shape, ScalarType dtype) {
  return allocated(shape, dtype, [&] {
    return torch::stable::new_zeros(t, {shape.data(), shape.size()}, dtype);
  });
}

SharedCode shared_code_for(const Tensor& x, const CodeSpec& spec) {
  if (!spec.per_tensor) return {};
  Tensor memory = empty_beside(x, {2}, ScalarType::Int);
  int32_t* const words = data_of<int32_t>(memory);
  return {memory, {reinterpret_cast<float*>(words), words + 1}};
}

}  // namespace qfx::cuda
