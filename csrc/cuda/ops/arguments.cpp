#include "cuda/ops/arguments.h"

#include <string>

#include "cuda/gemm/moves.h"

namespace qfx::cuda {
namespace {

// The layouts of an [n, k] weight that take this many bytes: those that differ in `group` may.
std::vector<WeightLayout> layouts_of(int64_t n, int64_t k, int64_t bytes) {
  std::vector<WeightLayout> found;
  const int64_t longest = WeightLayout::of(n, k, kMaxK + kCudaGroupMultiple).group;
  for (int64_t group = 0; group <= longest; group += kCudaGroupMultiple) {
    const WeightLayout layout = {n, k, group};
    if (layout.bytes() == bytes) found.push_back(layout);
  }
  return found;
}

std::vector<WeightLayout> checked(const char* op, const Tensor& packed, const Tensor& x, int64_t k,
                                  int64_t n) {
  check_dtype(op, "the packed weight", packed, {ScalarType::Char});
  STD_TORCH_CHECK(packed.dim() == 1, op, ": the packed weight has shape ", shape_of(packed),
                  ", pack_weight returns one dimension");
  const int64_t whole = WeightLayout{n, k}.bytes();
  if (packed.numel() == whole) return {{n, k}};
  const std::vector<WeightLayout> found = layouts_of(n, k, packed.numel());
  STD_TORCH_CHECK(!found.empty(), op, ": the packed weight has ", packed.numel(),
                  " bytes, but one for N=", n, " (n, or the size of w_scale) and K=", k,
                  " of x (shape ", shape_of(x), ") has ", whole, " and more only with groups");
  return found;
}

}  // namespace

FloatRows float_rows_of(const char* op, const Tensor& x, const Matrix& size,
                        const std::optional<Tensor>& factor, int64_t rotation) {
  const Transform transform = transform_of(factor, rotation);
  return {x.const_data_ptr(), dtype_of(op, x.scalar_type()), size.rows, size.columns, transform};
}

PackedWeight packed_of(const WeightLayout& layout, const Tensor& packed) {
  return {layout, static_cast<const int8_t*>(packed.const_data_ptr())};
}

WeightLayout layout_of(const char* op, const Tensor& packed, const Tensor& x, int64_t k,
                       int64_t n) {
  return checked(op, packed, x, k, n).front();
}

WeightLayout grouped_layout_of(const char* op, const Tensor& packed, const Tensor& x, int64_t k,
                               const Tensor& w_scale) {
  STD_TORCH_CHECK(w_scale.dim() == 2, op, ": w_scale has shape ", shape_of(w_scale),
                  ", expected [N, G]");
  const int64_t given = w_scale.size(1);
  std::string expected;
  for (const WeightLayout& layout : checked(op, packed, x, k, w_scale.size(0))) {
    const int64_t groups = layout.group == 0 ? std::min<int64_t>(k, 1) : layout.groups();
    if (groups == given) return layout;
    expected = std::to_string(w_scale.size(0)) + "x" + std::to_string(groups) +
               ": a column for each group of " +
               std::to_string(layout.group == 0 ? k : layout.group) +
               " of the K=" + std::to_string(k);
  }
  STD_TORCH_CHECK(false, op, ": w_scale has shape ", shape_of(w_scale), ", expected ", expected);
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
