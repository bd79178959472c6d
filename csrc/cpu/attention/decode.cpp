#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention/attention.h"
#include "cpu/core/scratch.h"
#include "cpu/gemm/pack.h"
#include "cpu/kernels/tables/attention.h"
#include "cpu/kernels/tables/sums.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kKeysAtOnce = 64;  // of half types, which are widened first

// f(rows, stride, first, count) over rows first..end of x in float32.
template <typename F>
void in_floats(const Kernels& kernels, const FloatMatrix& x, int64_t first, int64_t end,
               const F& f) {
  if (x.dtype == Dtype::kFloat32) {
    f(static_cast<const float*>(x.row(first)), x.stride, first, end - first);
    return;
  }
  thread_local Scratch scratch;
  float* wide = scratch.get<float>(kKeysAtOnce * x.columns);
  for (; first < end; first += kKeysAtOnce) {
    const int64_t count = std::min(kKeysAtOnce, end - first);
    for (int64_t i = 0; i < count; ++i) {
      kernels.row->widen(x.row(first + i), x.dtype, x.columns, wide + i * x.columns);
    }
    f(wide, x.columns, first, count);
  }
}

// f(first, end) for runs of keys that are seen: all without a mask.
template <typename F>
void where_seen(const float* mask, int64_t keys, const F& f) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  if (mask == nullptr) return f(int64_t{0}, keys);
  for (int64_t first = 0; first < keys; ++first) {
    int64_t end = first;
    while (end < keys && mask[end] != kHidden) ++end;
    if (end > first) f(first, end);
    first = end;
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
    kernels.sums->finish_floats(&args);
  }
}

void attend_row(const Kernels& kernels, const Attention& a, const KeyHead& head,
                const QueryHead& query, int64_t m) {
  thread_local Scratch memory, sums;
  const int64_t keys = a.keys_of_row(m);
  const int64_t width = round_up(keys, kPanel), e = a.v.columns;
  float *scores = memory.get<float>(2 * width), *mask = nullptr;
  float* y = sums.get<float>(round_up(e, kPanel));
  if (a.mask.kind != Mask::Kind::kNone) {
    mask = scores + width;
    load_mask(kernels, at(a.mask, query.mask), m, keys, mask);
  }
  const float* q = row_as_floats(kernels, at(a.q, query.q), m);
  std::fill_n(scores, width, -std::numeric_limits<float>::infinity());
  const auto score = [&](const float* k, int64_t stride, int64_t first, int64_t count) {
    kernels.attention->score_keys(q, k, stride, count, a.k.columns, a.scale, scores + first);
    for (int64_t n = first; mask != nullptr && n < first + count; ++n) scores[n] += mask[n];
  };
  where_seen(mask, keys, [&](int64_t first, int64_t end) {
    in_floats(kernels, at(a.k, head.k), first, end, score);
  });
  const float top = greatest(scores, keys);
  const float sum =
      kernels.attention->exponentials(scores, width, std::isinf(top) && top < 0 ? 0 : top);
  std::fill_n(y, round_up(e, kPanel), 0.f);
  const auto mix = [&](const float* v, int64_t stride, int64_t first, int64_t count) {
    kernels.attention->mix_values(scores + first, v, stride, count, e, y);
  };
  where_seen(mask, keys, [&](int64_t first, int64_t end) {
    in_floats(kernels, at(a.v, head.v), first, end, mix);
  });
  store(kernels, a, y, sum, query.out + m * e * (a.dtype == Dtype::kFloat32 ? 4 : 2));
}

}  // namespace

void attend_in_float(const Kernels& kernels, const Attention& a, int64_t query) {
  const KeyHead& head = a.keys[query / a.group()];
  for (int64_t m = 0; m < a.q.rows; ++m) attend_row(kernels, a, head, a.queries[query], m);
}

}  // namespace qfx::cpu
