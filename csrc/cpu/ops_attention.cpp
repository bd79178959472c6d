// int8_attention on the CPU.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/arguments.h"
#include "cpu/attention.h"
#include "cpu/matrices.h"
#include "cpu/parallel.h"

namespace qfx::cpu {
namespace {

struct Sizes {
  int64_t batch, m, n, d, e;
};

Sizes sizes_of(const char* op, const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto same_batch = [&](const Tensor& t) {
    return t.dim() == q.dim() &&
           std::equal(q.sizes().begin(), q.sizes().end() - 2, t.sizes().begin());
  };
  STD_TORCH_CHECK(q.dim() >= 2 && same_batch(k) && same_batch(v), op, ": q has shape ", shape_of(q),
                  ", k ", shape_of(k), " and v ", shape_of(v),
                  ", expected [*B, M, D], [*B, N, D] and [*B, N, E] with the same batch axes");
  const int64_t last = q.dim() - 1, d = q.size(last), n = k.size(last - 1);
  STD_TORCH_CHECK(d == k.size(last), op, ": q has D=", d, " (shape ", shape_of(q),
                  ") but k has D=", k.size(last), " (shape ", shape_of(k), ")");
  STD_TORCH_CHECK(n == v.size(last - 1), op, ": k has N=", n, " keys (shape ", shape_of(k),
                  ") but v has ", v.size(last - 1), " (shape ", shape_of(v), ")");
  STD_TORCH_CHECK(std::max(n, d) <= kMaxK, op, ": N=", n, " or D=", d, " is above ", kMaxK,
                  ", where the int32 accumulator of a dot product could overflow");
  int64_t batch = 1;
  for (auto size = q.sizes().begin(); size != q.sizes().end() - 2; ++size) batch *= *size;
  return {batch, q.size(last - 1), n, d, v.size(last)};
}

// A mask that broadcasts to [*B, M, N]: sizes of 1 and missing axes repeat.
class Masks {
 public:
  Masks(const char* op, const std::optional<Tensor>& mask, const Tensor& q, int64_t n) {
    if (!mask.has_value()) return;
    check_dtype(op, "mask", *mask, {ScalarType::Float, ScalarType::Bool});
    mask_.kind = mask->scalar_type() == ScalarType::Bool ? Mask::Kind::kBool : Mask::Kind::kFloat;
    mask_.data = static_cast<const char*>(mask->const_data_ptr());
    sizes_.assign(q.sizes().begin(), q.sizes().end());
    sizes_.back() = n;
    const int64_t missing = q.dim() - mask->dim();
    const int64_t element = mask_.kind == Mask::Kind::kBool ? 1 : 4;
    strides_.assign(q.dim(), 0);
    bool fits = missing >= 0;
    for (int64_t i = std::max<int64_t>(missing, 0); fits && i < q.dim(); ++i) {
      const int64_t size = mask->size(i - missing);
      fits = size == 1 || size == sizes_[i];
      strides_[i] = size == 1 ? 0 : mask->stride(i - missing) * element;
    }
    STD_TORCH_CHECK(fits, op, ": mask has shape ", shape_of(*mask),
                    ", which does not broadcast to the scores of q with shape ", shape_of(q),
                    " and N=", n);
    mask_.row_stride = strides_[q.dim() - 2];
    mask_.column_stride = strides_[q.dim() - 1];
  }

  Mask operator[](int64_t i) const {
    Mask mask = mask_;
    for (int64_t d = static_cast<int64_t>(sizes_.size()) - 2; d-- > 0; i /= sizes_[d]) {
      mask.data += i % sizes_[d] * strides_[d];
    }
    return mask;
  }

 private:
  Mask mask_;
  std::vector<int64_t> sizes_, strides_;
};

FloatMatrix matrix(const Matrices& all, int64_t i, Dtype dtype) {
  return {all[i], dtype, all.rows, all.columns, all.row_stride};
}

Tensor int8_attention(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask, double scale,
                      bool causal, ScalarType out_dtype) {
  constexpr const char* op = "int8_attention";
  check_float(op, "q", q);
  check_float(op, "k", k);
  check_float(op, "v", v);
  const Sizes size = sizes_of(op, q, k, v);
  const Masks masks(op, mask, q, size.n);
  q = with_contiguous_rows(q);
  k = with_contiguous_rows(k);
  v = with_contiguous_rows(v);
  const Dtype q_dtype = dtype_of(op, q.scalar_type()), k_dtype = dtype_of(op, k.scalar_type()),
              v_dtype = dtype_of(op, v.scalar_type()), dtype = dtype_of(op, out_dtype);
  Tensor y = empty_on_cpu(with_last(q, size.e), out_dtype);
  char* out = static_cast<char*>(y.mutable_data_ptr());
  const int64_t bytes = size.m * size.e * (dtype == Dtype::kFloat32 ? 4 : 2);
  const Kernels& kernels = kernels_of(current_isa());
  const Matrices queries(q), keys(k), values(v);
  constexpr int64_t kStepsPerScore = 64;  // in parallel.h's unit
  const int64_t work = size.batch * size.m * size.n * (size.d + 2 * size.e + kStepsPerScore);
  parallel(size.batch, work, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      attend(kernels,
             {matrix(queries, i, q_dtype), matrix(keys, i, k_dtype), matrix(values, i, v_dtype),
              masks[i], static_cast<float>(scale), causal, dtype, out + i * bytes});
    }
  });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) { m.impl("int8_attention", TORCH_BOX(&int8_attention)); }

}  // namespace
}  // namespace qfx::cpu
