#include "cpu/gemm/linear.h"

#include "cpu/core/scratch.h"
#include "cpu/gemm/lowbit_product.h"

namespace qfx::cpu {

void linear_of_rows(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                    const PackedWeight& w, const FloatOutput& to, float* scales,
                    const Streaming* how) {
  TensorCode shared{};
  if (spec.per_tensor) shared = choose_tensor_code(kernels, x, spec, scales);
  in_chunks(kernels, w, x.rows, [&](int64_t first, int64_t count) {
    const TensorCode part = spec.per_tensor ? shared.part(first) : shared;
    const TensorCode* same = spec.per_tensor ? &part : nullptr;
    FloatRows from(kernels, w, x.part(first, count), spec, same, scales + first);
    from.rows.tuning = with_streaming(from.rows.tuning, how);
    gemm(from, w, FloatSink(kernels, w, from.rows, to, scales, 1, first));
  });
}

void lowbit_linear_of_rows(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                           int64_t group, const LowbitWeight& w, const FloatOutput& to,
                           const Streaming* how) {
  thread_local Scratch scratch;
  TensorCode shared{};
  const bool per_tensor = spec.per_tensor && group == 0;
  if (per_tensor) {
    shared = choose_tensor_code(kernels, x, spec, scratch.get<float>(x.rows));
  }
  in_chunks(kernels, w.shape, x.rows, [&](int64_t first, int64_t count) {
    const TensorCode part = per_tensor ? shared.part(first) : shared;
    const Format& format = lowbit_format_for(kernels, w, !spec.symmetric, count);
    const GroupedFloats rows(kernels, format, w.shape, x.part(first, count), spec, group != 0,
                             per_tensor ? &part : nullptr, needs_sums(kernels, w, format), nullptr);
    lowbit_linear(kernels, rows, w, to, first, how);
  });
}

}  // namespace qfx::cpu
