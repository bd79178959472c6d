#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention.h"
#include "cpu/pack.h"
#include "cpu/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kKeysAtOnce = 64;  // of half types, which are widened first

// f(rows, stride, first, count) over rows 0..count of x in float32.
template <typename F>
void in_floats(const Kernels& kernels, const FloatMatrix& x, int64_t rows, const F& f) {
  if (x.dtype == Dtype::kFloat32) {
    f(static_cast<const float*>(x.row(0)), x.stride, int64_t{0}, rows);
    return;
  }
  thread_local Scratch scratch;
  float* wide = scratch.get<float>(kKeysAtOnce * x.columns);
  for (int64_t first = 0; first < rows; first += kKeysAtOnce) {
    const int64_t count = std::min(kKeysAtOnce, rows - first);
    for (int64_t i = 0; i < count; ++i) {
      kernels.row->widen(x.row(first + i), x.dtype, x.columns, wide + i * x.columns);
    }
    f(wide, x.columns, first, count);
  }
}

// The greatest score: a NaN among them is not seen here, and shows in the sum.
float greatest(const float* scores, int64_t count) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t n = 0; n < count; ++n) top = scores[n] > top ? scores[n] : top;
  return top;
}

// (A9): the row y [e], padded to whole panels, over the sum of its exponentials. A row without keys
// is 0.
void store(const Kernels& kernels, const Attention& a, float* y, float sum, char* out) {
  const int64_t e = a.v.columns, element = a.dtype == Dtype::kFloat32 ? 4 : 2;
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  FloatPanel panel = {};
  std::fill_n(panel.scale, kPanel, 1.f);
  if (sum == 0.f) std::fill_n(y, e, 0.f);
  for (int64_t n = 0; n < e; n += kPanel) {
    const int columns = static_cast<int>(std::min<int64_t>(kPanel, e - n));
    const FloatEpilogueArgs args = {
        y + n, 1, columns, &inverse, 0, &panel, Activation::kNone, a.dtype, out + n * element, e};
    kernels.row->finish_floats(&args);
  }
}

void attend_row(const Kernels& kernels, const Attention& a, int64_t m) {
  thread_local Scratch memory, sums;
  const int64_t keys = a.causal ? std::min(a.k.rows, m + 1) : a.k.rows;
  const int64_t width = round_up(keys, kPanel), e = a.v.columns;
  float* scores = memory.get<float>(2 * width);
  float* y = sums.get<float>(round_up(e, kPanel));
  const float* q = row_as_floats(kernels, a.q, m);
  in_floats(kernels, a.k, keys, [&](const float* k, int64_t stride, int64_t first, int64_t count) {
    kernels.row->score_keys(q, k, stride, count, a.k.columns, a.scale, scores + first);
  });
  if (a.mask.kind != Mask::Kind::kNone) {
    load_mask(a.mask, m, keys, scores + width);
    for (int64_t n = 0; n < keys; ++n) scores[n] = scores[n] + scores[width + n];
  }
  std::fill(scores + keys, scores + width, -std::numeric_limits<float>::infinity());
  const float top = greatest(scores, keys);
  const float sum = kernels.row->exponentials(scores, width, std::isinf(top) && top < 0 ? 0 : top);
  std::fill_n(y, round_up(e, kPanel), 0.f);
  in_floats(kernels, a.v, keys, [&](const float* v, int64_t stride, int64_t first, int64_t count) {
    kernels.row->mix_values(scores + first, v, stride, count, e, y);
  });
  store(kernels, a, y, sum, a.out + m * e * (a.dtype == Dtype::kFloat32 ? 4 : 2));
}

}  // namespace

void attend_in_float(const Kernels& kernels, const Attention& a) {
  for (int64_t m = 0; m < a.q.rows; ++m) attend_row(kernels, a, m);
}

}  // namespace qfx::cpu
