#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/pack_floats.h"
#include "cpu/product.h"
#include "cpu/scratch.h"

namespace qfx::cpu {
namespace {

constexpr CodeSpec kSymmetric = {8, true, false};
constexpr int32_t kProbabilityZero = -128;  // the zero point of both bytes of a probability

// The rows of x in float32, one behind the other.
float* gathered(const Kernels& kernels, const FloatMatrix& x, Scratch& scratch) {
  float* out = scratch.get<float>(x.rows * x.columns);
  for (int64_t m = 0; m < x.rows; ++m) {
    const float* row = row_as_floats(kernels, x, m);
    std::memcpy(out + m * x.columns, row, x.columns * sizeof(float));
  }
  return out;
}

// Queries and keys alike, which leaves their products as they are. (A2)
void rotate(const Kernels& kernels, float* x, int64_t rows, int64_t features) {
  const Transform transform = {nullptr, features % 64 == 0 ? 64 : features % 16 == 0 ? 16 : 0};
  Range range;
  if (transform.rotation != 0) kernels.row->rotate(x, rows * features, &transform, x, &range);
}

// k less its mean over the keys, which moves all scores of a row alike: softmax does not see it,
// and what is left has a smaller range. [N, D] in float32. (A1)
float* centered(const Kernels& kernels, const FloatMatrix& k) {
  thread_local Scratch scratch, means;
  float* out = gathered(kernels, k, scratch);
  float* mean = means.get<float>(k.columns);
  std::fill(mean, mean + k.columns, 0.f);
  for (int64_t n = 0; n < k.rows; ++n) {
    for (int64_t d = 0; d < k.columns; ++d) mean[d] += out[n * k.columns + d];
  }
  for (int64_t d = 0; d < k.columns; ++d) mean[d] /= static_cast<float>(k.rows);
  for (int64_t n = 0; n < k.rows; ++n) {
    for (int64_t d = 0; d < k.columns; ++d) out[n * k.columns + d] -= mean[d];
  }
  return out;
}

// (A2)
PackedFloats pack_keys(const Kernels& kernels, const FloatMatrix& k) {
  thread_local PackMemory memory;
  float* floats = centered(kernels, k);
  rotate(kernels, floats, k.rows, k.columns);
  return pack_floats(kernels, {floats, Dtype::kFloat32, k.rows, k.columns, k.columns, 1},
                     kSymmetric, memory);
}

// (A5)
PackedFloats pack_values(const Kernels& kernels, const FloatMatrix& v) {
  thread_local PackMemory memory;
  return pack_floats(kernels, {v.data, v.dtype, v.columns, v.rows, 1, v.stride}, kSymmetric,
                     memory);
}

// sums[p][e] = the sum of the codes of the first 32 p keys.
const int32_t* sums_of_first_keys(const PackedWeight& v) {
  thread_local Scratch scratch;
  const int64_t width = round_up(v.n, kPanel), panels = round_up(v.k, kPanel) / kPanel;
  int32_t* sums = scratch.get<int32_t>((panels + 1) * width);
  std::fill(sums, sums + width, 0);
  for (int64_t p = 0; p < panels; ++p, sums += width) {
    for (int64_t n = 0; n < width; ++n) {
      const int8_t* codes = v.panel(n / kPanel) + p * kPanel * kPanel + n % kPanel * kGroup;
      int32_t sum = sums[n];
      for (int64_t i = 0; i < kPanel; ++i) sum += codes[i / kGroup * kPanel * kGroup + i % kGroup];
      sums[width + n] = sum;
    }
  }
  return sums - panels * width;
}

// The tiles of `count` arranged rows from `first` on with one panel: out[count][32].
void multiply(const Rows& rows, int64_t first, int64_t count, const int8_t* panel, int64_t depth,
              int32_t* out) {
  const Format& format = *rows.format;
  for (int64_t m = 0; m < count; m += format.tile_rows) {
    const int64_t height = std::min<int64_t>(format.tile_rows, count - m);
    format.tiles[height - 1](rows.a + (first + m) * rows.stride, rows.stride, panel, depth / kGroup,
                             panel, out + m * kPanel, false);
  }
}

// A few rows of queries at a time, from scores to outputs, in memory of the calling thread.
class Block {
 public:
  Block(const Kernels& kernels, const Attention& a, const PackedFloats& k, const PackedFloats& v,
        const Rows& queries, const float* query_scale)
      : kernels_(kernels),
        a_(a),
        k_(k),
        v_(v),
        queries_(queries),
        query_scale_(query_scale),
        rows_(std::min<int64_t>(queries.format->tile_rows, a.q.rows)),
        width_(round_up(a.k.rows, kPanel)) {
    thread_local Scratch scores, codes, mask;
    thread_local RowsMemory memory;
    scores_ = scores.get<int32_t>(rows_ * width_);
    codes_ = codes.get<int8_t>(2 * width_);
    mask_ = mask.get<float>(width_);
    std::fill(mask_, mask_ + width_, 0.f);
    probabilities_ =
        make_rows(format_for(kernels, Operands::kWide, 2 * rows_), 2 * rows_, v.weight, memory);
    causal_sums_ = a.causal ? sums_of_first_keys(v.weight) : nullptr;
    if (a.mask.kind != Mask::Kind::kNone && a.mask.row_stride == 0) {
      load_mask(a.mask, 0, a.k.rows, mask_);
    }
  }

  int64_t rows() const { return rows_; }

  // Of the probabilities.
  const Format& format() const { return *probabilities_.format; }

  // Queries first..first + count, count <= rows().
  void run(int64_t first, int64_t count) {
    const int64_t seen = a_.causal ? std::min(a_.k.rows, first + count) : a_.k.rows;
    const int64_t panels = round_up(seen, kPanel) / kPanel;
    const int64_t depth = round_up(a_.q.columns, queries_.format->k_multiple);
    for (int64_t p = 0; p < panels; ++p) {
      multiply(queries_, first, count, k_.weight.panel(p), depth, scores_ + p * count * kPanel);
    }
    for (int64_t r = 0; r < count; ++r) softmax(first, r, count, panels * kPanel);
    mix(first, count, std::min(panels * kPanel, a_.k.rows));
  }

 private:
  // Scores of row r -> its two rows of probabilities, arranged. (A3), (A4)
  void softmax(int64_t first, int64_t r, int64_t count, int64_t width) {
    const int64_t m = first + r, step = count * kPanel;
    if (a_.mask.kind != Mask::Kind::kNone && a_.mask.row_stride != 0) {
      load_mask(a_.mask, m, a_.k.rows, mask_);
    }
    int32_t* scores = scores_ + r * kPanel;
    const ScoreArgs args = {scores,
                            step,
                            width,
                            a_.causal ? std::min(a_.k.rows, m + 1) : a_.k.rows,
                            queries_.add[m],
                            queries_.mul[m],
                            query_scale_[m] * a_.scale,
                            k_.scale,
                            k_.weight.colsum,
                            a_.mask.kind == Mask::Kind::kNone ? nullptr : mask_};
    const float top = kernels_.row->score(&args);
    int8_t *high = codes_, *low = codes_ + width_;
    if (std::isfinite(top)) {
      const int64_t sum = kernels_.row->probabilities(scores, step, width, top, high, low);
      inverse_[r] = 1.f / static_cast<float>(sum);
    } else {  // no key counts: the row is 0, as PyTorch's; or a fault, which shows
      std::memset(codes_, kProbabilityZero, 2 * width_);
      inverse_[r] = std::isnan(top) || top > 0 ? std::numeric_limits<float>::quiet_NaN() : 0.f;
    }
    const int64_t keys = std::min(width, a_.k.rows);
    arrange(high, keys, r);
    arrange(low, keys, rows_ + r);
  }

  void arrange(const int8_t* codes, int64_t keys, int64_t row) {
    const Format& format = *probabilities_.format;
    const int64_t depth = round_up(keys, format.k_multiple);
    probabilities_.add[row] =
        format.arrange(codes, keys, depth, probabilities_.a + row * probabilities_.stride);
  }

  // Probabilities times values. (A6)
  void mix(int64_t first, int64_t count, int64_t keys) {
    const Format& format = *probabilities_.format;
    const int64_t depth = round_up(keys, format.k_multiple);
    const int64_t e = a_.v.columns, element = a_.dtype == Dtype::kFloat32 ? 4 : 2;
    const int32_t* sums = a_.causal
                              ? causal_sums_ + round_up(keys, kPanel) / kPanel * round_up(e, kPanel)
                              : v_.weight.colsum;
    int32_t high[kMaxTileRows * kPanel], low[kMaxTileRows * kPanel];
    float scale[kPanel] = {};
    for (int64_t n = 0; n < e; n += kPanel) {
      const int columns = static_cast<int>(std::min<int64_t>(kPanel, e - n));
      const int8_t* panel = v_.weight.panel(n / kPanel);
      multiply(probabilities_, 0, count, panel, depth, high);
      multiply(probabilities_, rows_, count, panel, depth, low);
      std::copy_n(v_.scale + n, columns, scale);
      for (int64_t r = 0; r < count; ++r) {
        const MixArgs args = {high + r * kPanel,
                              low + r * kPanel,
                              {probabilities_.add[r], probabilities_.add[rows_ + r]},
                              kProbabilityZero + format.mul_offset,
                              sums + n,
                              scale,
                              inverse_[r],
                              columns,
                              a_.dtype,
                              a_.out + ((first + r) * e + n) * element};
        kernels_.row->mix(&args);
      }
    }
  }

  const Kernels& kernels_;
  const Attention& a_;
  const PackedFloats& k_;
  const PackedFloats& v_;
  const Rows& queries_;
  const float* query_scale_;
  int64_t rows_, width_;
  int32_t* scores_;
  int8_t* codes_;
  float* mask_;
  const int32_t* causal_sums_;
  Rows probabilities_;
  float inverse_[kMaxTileRows];
};

}  // namespace

void load_mask(const Mask& mask, int64_t m, int64_t keys, float* out) {
  const char* row = mask.data + m * mask.row_stride;
  for (int64_t n = 0; n < keys; ++n, row += mask.column_stride) {
    if (mask.kind == Mask::Kind::kBool) {
      out[n] = *row != 0 ? 0.f : -std::numeric_limits<float>::infinity();
    } else {
      std::memcpy(out + n, row, sizeof(float));
    }
  }
}

void attend(const Kernels& kernels, const Attention& a) {
  const PackedFloats k = pack_keys(kernels, a.k), v = pack_values(kernels, a.v);
  thread_local Scratch scales, floats;
  float* query_scale = scales.get<float>(a.q.rows);
  float* rotated = gathered(kernels, a.q, floats);
  rotate(kernels, rotated, a.q.rows, a.q.columns);
  const FloatMatrix q = {rotated, Dtype::kFloat32, a.q.rows, a.q.columns};
  const Rows queries = rows_of_floats(kernels, k.weight, q, kSymmetric, nullptr, query_scale);
  Block block(kernels, a, k, v, queries, query_scale);
  for (int64_t m = 0; m < a.q.rows; m += block.rows()) {
    block.run(m, std::min(block.rows(), a.q.rows - m));
  }
  release(*queries.format);
  release(block.format());
}

}  // namespace qfx::cpu
