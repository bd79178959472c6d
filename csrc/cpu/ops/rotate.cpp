// rotate on the CPU.
#include <algorithm>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/kernels/tables/sums.h"
#include "cpu/ops/arguments.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

// A row of floats, rounded to `dtype`: the epilogue (W1) with scales of one.
void store_floats(const Kernels& kernels, const float* row, int64_t n, Dtype dtype, char* out) {
  constexpr float kOne = 1.f;
  const int64_t element = dtype == Dtype::kFloat32 ? 4 : 2;
  FloatPanel panel = {};
  std::fill_n(panel.scale, kPanel, 1.f);
  for (int64_t i = 0; i < n; i += kPanel) {
    const int columns = static_cast<int>(std::min<int64_t>(kPanel, n - i));
    float rest[kPanel] = {};
    const float* from = row + i;
    if (columns < kPanel) from = std::copy_n(from, columns, rest) - columns;
    const FloatEpilogueArgs args = {
        from, 1, columns, &kOne, 0, &panel, Activation::kNone, dtype, out + i * element, n};
    kernels.sums->finish_floats(&args);
  }
}

// Row m transformed, or transformed back, in memory of the calling thread.
const float* transformed(const Kernels& kernels, const FloatMatrix& x, bool back, int64_t m) {
  if (!back) return row_as_floats(kernels, x, m);
  thread_local Scratch scratch;
  float* out = scratch.get<float>(x.columns);
  FloatMatrix plain = x;
  plain.transform = {};
  const float* row = row_as_floats(kernels, plain, m);
  kernels.row->rotate_back(row, x.columns, &x.transform, out);
  return out;
}

Tensor rotate(Tensor x, std::optional<Tensor> factor, int64_t rotation, bool back) {
  constexpr const char* op = "rotate";
  constexpr int64_t kStepsPerElement = 16;  // in parallel.h's unit
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  check_cpu_transform(op, x, size, factor, rotation);
  x = made_contiguous(x);
  factor = made_contiguous(factor);
  const FloatMatrix matrix = float_matrix_of(op, x, size, factor, rotation);
  Tensor y = empty_on_cpu(with_last(x, size.columns), x.scalar_type());
  if (y.numel() == 0) return y;  // of rows without number, perhaps
  char* out = static_cast<char*>(y.mutable_data_ptr());
  const int64_t row_bytes = size.columns * (matrix.dtype == Dtype::kFloat32 ? 4 : 2);
  const Kernels& kernels = kernels_of(current_isa());
  parallel(size.rows, size.rows * size.columns * kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const float* row = transformed(kernels, matrix, back, m);
      store_floats(kernels, row, size.columns, matrix.dtype, out + m * row_bytes);
    }
  });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) { implement<"rotate", &rotate>(m); }

}  // namespace
}  // namespace qfx::cpu
