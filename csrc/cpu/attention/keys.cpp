#include "cpu/attention/keys.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/kernels/tables/attention.h"

namespace qfx::cpu {
namespace {

constexpr float kSmallestScale = 0x1p-126f;

// Consecutive parts of a piece of memory, or of none, to count its bytes.
class Parts {
 public:
  explicit Parts(char* memory) : memory_(memory) {}

  template <typename T>
  void take(int64_t count, T** part) {
    *part = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + taken_);
    taken_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  }

  int64_t taken() const { return taken_; }

 private:
  char* memory_;
  int64_t taken_ = 0;
};

// Rows first, first + 1, ... of x as codes, q[32][stride], zero padded on both sides.
void quantize_panel(const Kernels& kernels, const FloatMatrix& x, int64_t first, int64_t count,
                    const float* center, float* scale, int8_t* q, int64_t stride) {
  thread_local Scratch scratch;
  const PanelCodesArgs args = {.x = x.row(first),
                               .dtype = x.dtype,
                               .stride = x.stride * (x.dtype == Dtype::kFloat32 ? 4 : 2),
                               .rows = count,
                               .columns = x.columns,
                               .center = center,
                               .rotation = rotation_of(x.columns).rotation,
                               .floats = scratch.get<float>(kPanel * round_up(x.columns, kPanel)),
                               .codes = q,
                               .code_stride = stride,
                               .padded = stride,
                               .offset = 0,
                               .scale = scale};
  kernels.attention->codes_of_panel(&args);
  std::memset(q + count * stride, 0, (kPanel - count) * stride);
}

void pack_values(const Kernels& kernels, const FloatMatrix& v, int64_t first, int64_t count,
                 const HeadCodes& out) {
  thread_local Scratch scratch;
  const int64_t width = round_up(v.columns, kPanel);
  int8_t* q = scratch.get<int8_t>(kPanel * width);
  float* scale = out.v_scale + first;
  quantize_panel(kernels, v, first, count, nullptr, scale, q, width);
  for (int64_t r = 0; r < kPanel; ++r) {
    const bool finite = r < count && std::isfinite(scale[r]);
    if (r < count && !finite) out.k_scale[first + r] = std::nanf("");
    scale[r] = finite && scale[r] > kSmallestScale ? scale[r] : 0.f;
  }
  for (int64_t e = 0; e < width; e += kPanel) {
    int8_t* block = out.v_blocks + e * out.v.padded_k + first * kPanel;
    kernels.attention->interleave_values(q + e, width, block,
                                         out.v_sums + first / kPanel * width + e);
  }
}

// What pads the values' depth after the last panel of keys.
void clear_padding(const HeadCodes& out, int64_t from) {
  const int64_t left = out.v.padded_k - from;
  for (int64_t p = 0; p < out.v.panels(); ++p) {
    std::memset(out.v_blocks + p * kPanel * out.v.padded_k + from * kPanel, 0, left * kPanel);
  }
}

// Adds the keys that are seen, in their order.
void sum_seen(const Kernels& kernels, const FloatMatrix& k, const uint8_t* seen, float* sum) {
  constexpr float kOnes[kPanel] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                   1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  for (int64_t n = 0; n < k.rows;) {
    int64_t end = n;
    while (end < k.rows && end < n + kPanel && seen[end] != 0) ++end;
    if (k.dtype == Dtype::kFloat32) {
      kernels.attention->mix_values(kOnes, static_cast<const float*>(k.row(n)), k.stride, end - n,
                                    k.columns, sum);
    } else {
      for (int64_t i = n; i < end; ++i) {
        kernels.attention->mix_values(kOnes, row_as_floats(kernels, k, i), 0, 1, k.columns, sum);
      }
    }
    n = std::max(end, n + 1);
  }
}

}  // namespace

void pack_as_keys(const Kernels& kernels, const FloatMatrix& x, int64_t first, int64_t count,
                  const KeyPanels& out) {
  thread_local Scratch scratch;
  int8_t* q = scratch.get<int8_t>(kPanel * out.depth);
  float* scale = out.scale + first;
  quantize_panel(kernels, x, first, count, out.center, scale, q, out.depth);
  for (int64_t r = 0; r < kPanel; ++r) {
    scale[r] = r >= count ? 0.f : std::isfinite(scale[r]) ? scale[r] : std::nanf("");
  }
  kernels.attention->interleave_keys(q, out.depth, out.depth / kGroup,
                                     out.blocks + first * out.depth, out.sums + first);
}

HeadCodes::HeadCodes(const HeadSizes& size, char* memory) {
  Parts parts(memory);
  const int64_t np = size.padded_n(), ep = size.padded_e();
  parts.take(np, &k_scale);
  parts.take(np, &v_scale);
  parts.take(np, &k_sums);
  parts.take(size.panels() * ep, &v_sums);
  parts.take(round_up(size.d, kPanel), &center);
  parts.take(1, &centered);
  parts.take(np * padded_k(size.d), &k_blocks);
  parts.take(ep * padded_k(size.n), &v_blocks);
  k = {size.n, size.d, padded_k(size.d), false, k_sums, k_blocks};
  v = {size.e, size.n, padded_k(size.n), false, nullptr, v_blocks};
  bytes = parts.taken();
}

void find_center(const Kernels& kernels, const Attention& a, const void* keys, const char* mask,
                 float* center, bool* centered) {
  thread_local Scratch scratch;
  uint8_t* seen = scratch.get<uint8_t>(a.k.rows);
  const Mask whole = at(a.mask, mask);
  *centered = !a.causal && all_see_the_same(kernels, whole, a.q.rows, a.k.rows, seen);
  if (!*centered) return;
  std::fill_n(center, round_up(a.k.columns, kPanel), 0.f);
  sum_seen(kernels, at(a.k, keys), seen, center);
  const int64_t count = std::count(seen, seen + a.k.rows, uint8_t{1});
  for (int64_t d = 0; d < a.k.columns; ++d) center[d] /= static_cast<float>(count);
}

void pack_panel(const Kernels& kernels, const Attention& a, int64_t head, int64_t panel,
                const HeadCodes& out) {
  const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, a.k.rows - first);
  pack_as_keys(kernels, at(a.k, a.keys[head].k), first, count, out.keys());
  pack_values(kernels, at(a.v, a.keys[head].v), first, count, out);
  if (first + count == a.k.rows) clear_padding(out, first + kPanel);
}

}  // namespace qfx::cpu
