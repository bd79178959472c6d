// int8_bmm, int8_bmm_dynamic on the CPU: products of two computed operands. b, which takes the
// place of the weight, is packed on the way, one matrix at a time.
#include <algorithm>
#include <vector>

#include "batch.h"
#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/gemm/pack_floats.h"
#include "cpu/gemm/product.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/arguments.h"
#include "cpu/ops/matrices.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

// Runs f(i) for each matrix of the batch.
template <typename F>
void for_each_matrix(const BatchSizes& size, const F& f) {
  constexpr int64_t kStepsPerElement = 32;  // of quantizing and packing, in parallel.h's unit
  const int64_t one = size.m * size.n * size.k + (size.m + size.n) * size.k * kStepsPerElement;
  parallel(size.batch, size.batch * one, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

Tensor int8_bmm(Tensor a_q, Tensor a_zero_point, Tensor b_q) {
  constexpr const char* op = "int8_bmm";
  check_dtype(op, "a_q", a_q, {ScalarType::Char});
  check_dtype(op, "b_q", b_q, {ScalarType::Char});
  const BatchSizes size = batch_sizes_of(op, "a_q", a_q, "b_q", b_q);
  check_zero_point(op, a_zero_point, size.batch * size.m);
  a_q = made_contiguous(a_q);
  a_zero_point = made_contiguous(a_zero_point);
  Tensor acc = empty_on_cpu(with_last(a_q, size.n), ScalarType::Int);
  if (acc.numel() == 0) return acc;  // of matrices without number, perhaps
  const Kernels& kernels = kernels_of(current_isa());
  const int8_t* a = static_cast<const int8_t*>(a_q.const_data_ptr());
  const Matrices b(b_q);
  const int64_t step = stride_of(a_zero_point), bytes = packed_size(size.n, size.k);
  int32_t* out = static_cast<int32_t*>(acc.mutable_data_ptr());
  for_each_matrix(size, [&](int64_t i) {
    thread_local Scratch scratch;
    int8_t* packed = scratch.get<int8_t>(bytes);
    pack(reinterpret_cast<const int8_t*>(b[i]), size.n, size.k, b.row_stride, b.column_stride,
         packed);
    PackedWeight w;
    open_packed(packed, bytes, &w);
    in_chunks(kernels, w, size.m, [&](int64_t first, int64_t count) {
      const int64_t row = i * size.m + first;
      const int32_t* zeros = ints(a_zero_point) + row * step;
      const CodeRows from(kernels, w, a + row * size.k, zeros, step, count);
      gemm(from, w, IntegerSink(w, from.rows, out + row * size.n));
    });
  });
  return acc;
}

Tensor with_contiguous_rows_or_columns(const Tensor& t) {
  return t.stride(t.dim() - 2) == 1 ? t : with_contiguous_rows(t);
}

Tensor int8_bmm_dynamic(Tensor a, Tensor b, std::vector<int64_t> axes, int64_t bits, bool symmetric,
                        int64_t b_bits, ScalarType out_dtype) {
  constexpr const char* op = "int8_bmm_dynamic";
  check_float(op, "a", a);
  check_float(op, "b", b);
  const BatchSizes size = batch_sizes_of(op, "a", a, "b", b);
  const CodeSpec spec = code_spec_of(op, axes, bits, symmetric);
  const CodeSpec b_spec = code_spec_of(op, {1}, b_bits, true);
  const Dtype a_dtype = dtype_of(op, a.scalar_type()), b_dtype = dtype_of(op, b.scalar_type());
  const Dtype dtype = dtype_of(op, out_dtype);
  Tensor y = empty_on_cpu(with_last(a, size.n), out_dtype);
  if (y.numel() == 0) return y;
  char* out = static_cast<char*>(y.mutable_data_ptr());
  const Kernels& kernels = kernels_of(current_isa());
  a = spec.per_tensor ? made_contiguous(a) : with_contiguous_rows(a);
  b = with_contiguous_rows_or_columns(b);
  const Matrices a_matrices(a), b_matrices(b);
  TensorCode shared{};
  std::vector<float> all_scales(spec.per_tensor ? size.batch * size.m : 0);
  if (spec.per_tensor) {
    shared = choose_tensor_code(kernels, {a.const_data_ptr(), a_dtype, size.batch * size.m, size.k},
                                spec, all_scales.data());
  }
  for_each_matrix(size, [&](int64_t i) {
    thread_local PackMemory memory;
    const PackedFloats packed = pack_floats(
        kernels,
        {b_matrices[i], b_dtype, size.n, size.k, b_matrices.row_stride, b_matrices.column_stride},
        b_spec, memory);
    FloatOutput to = {packed.scale, nullptr, Activation::kNone, dtype, nullptr};
    to.data = out + i * size.m * size.n * to.element();
    const FloatMatrix x = {a_matrices[i], a_dtype, size.m, size.k, a_matrices.row_stride};
    thread_local Scratch scratch;
    float* scales = spec.per_tensor ? all_scales.data() + i * size.m
                                    : scratch.get<float>(std::max<int64_t>(size.m, 1));
    in_chunks(kernels, packed.weight, size.m, [&](int64_t first, int64_t count) {
      const TensorCode part = spec.per_tensor ? shared.part(i * size.m + first) : shared;
      const TensorCode* same = spec.per_tensor ? &part : nullptr;
      const FloatRows from(kernels, packed.weight, x.part(first, count), spec, same,
                           scales + first);
      gemm(from, packed.weight, FloatSink(kernels, packed.weight, from.rows, to, scales, 1, first));
    });
  });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"int8_bmm", &int8_bmm>(m);
  implement<"int8_bmm_dynamic", &int8_bmm_dynamic>(m);
}

}  // namespace
}  // namespace qfx::cpu
