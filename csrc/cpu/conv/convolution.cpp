#include "cpu/conv/convolution.h"

#include <algorithm>
#include <cstring>

#include "cpu/conv/im2col.h"
#include "cpu/conv/window_rows.h"
#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;  // of windows at a time, where they are written to memory

// Writes rows [count][n] that follow each other to rows that lie apart.
void spread(const char* from, int64_t count, int64_t bytes, int64_t stride, char* to) {
  for (int64_t m = 0; m < count; ++m) std::memcpy(to + m * stride, from + m * bytes, bytes);
}

// Windows in memory, some at a time; all of them where one scale is for all.
void convolve_in_memory(const Kernels& kernels, const Image& x, const Windows& of,
                        const WindowCode& code, const Linear& linear) {
  thread_local Scratch scratch, apart;
  const auto& [w, to] = linear;
  const PackedWeight& shape = w.shape();
  const int64_t row = of.k() * x.element(), rows = of.rows(), bytes = shape.n * to.element();
  const bool at_once = code.spec.per_tensor && code.group == 0, dense = to.row_of(shape) == shape.n;
  const int64_t most = kPieceBytes / std::max<int64_t>(row, 1);
  const int64_t piece = at_once ? rows : std::clamp<int64_t>(most, 1, rows);
  char* windows = scratch.get<char>(piece * row);
  for (int64_t first = 0; first < rows; first += piece) {
    const int64_t count = std::min(piece, rows - first), stride = to.row_of(shape) * to.element();
    im2col(x, of, first, count, windows);
    const FloatMatrix matrix = {windows, x.dtype, count, of.k(), of.k(), code.transform};
    char* const at = to.data + first * stride;
    FloatOutput out = {to.bias, to.activation, to.dtype,
                       dense ? at : apart.get<char>(count * bytes)};
    const Linear all[] = {{w, out}};
    linears_of_floats(kernels, {matrix, code.spec, code.group}, all);
    if (!dense) spread(out.data, count, bytes, stride, at);
  }
}

// Windows that are quantized where they are read.
void convolve_in_cache(const Kernels& kernels, const Image& x, const Windows& of,
                       const WindowCode& code, const Linear& linear) {
  thread_local Scratch scratch;
  const auto& [weight, to] = linear;
  const PackedWeight& w = weight.whole;
  float* scales = scratch.get<float>(of.rows());
  in_chunks(kernels, w, of.rows(), [&](int64_t first, int64_t count) {
    const WindowRows rows(kernels, w, {x, of, code.spec, code.transform}, first, count,
                          scales + first);
    gemm(rows, w, FloatSink(kernels, w, rows.rows, to, scales, 1, first));
  });
}

}  // namespace

void convolution(const Kernels& kernels, const Image& x, const Windows& of, const WindowCode& code,
                 const Linear& linear) {
  if (of.rows() == 0 || linear.w.shape().n == 0) return;
  const bool each_row = code.group == 0 && !code.spec.per_tensor;
  if (linear.w.one_scale() && each_row && of.k() > 0) {
    return convolve_in_cache(kernels, x, of, code, linear);
  }
  convolve_in_memory(kernels, x, of, code, linear);
}

}  // namespace qfx::cpu
