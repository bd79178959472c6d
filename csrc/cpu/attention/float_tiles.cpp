// Attention of many queries in float, six of them at a time. (A10)
#include <algorithm>
#include <array>
#include <limits>

#include "cpu/attention/attention.h"
#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/gemm/pack.h"
#include "cpu/kernels/tables/attention.h"
#include "cpu/kernels/tables/sums.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kRowsOfTask = 8 * kMaxFloatRows;  // that a thread takes, with a head's panels
constexpr double kStepsPerProduct = 4;              // in parallel.h's unit
constexpr float kHidden = -std::numeric_limits<float>::infinity();

constexpr std::array<float, kPanel> same(float value) {
  std::array<float, kPanel> all = {};
  for (float& each : all) each = value;
  return all;
}

int64_t padded(int64_t count) { return round_up(count, kPanel); }
int64_t grouped(int64_t count) { return round_up(count, kGroup); }

// The keys and values of a head as tiles read them: panels [D][32] of keys, [N][32] of features.
struct HeadPanels {
  Scratch keys, values;

  void pack(const Attention& a, const KeyHead& head) {
    const int64_t n = a.k.rows, d = a.k.columns, e = a.v.columns;
    float* k = keys.get<float>(grouped(d) * padded(n));
    std::fill_n(k, grouped(d) * padded(n), 0.f);
    const FloatMatrix from = at(a.k, head.k), mixed = at(a.v, head.v);
    for (int64_t i = 0; i < n; ++i) {
      const float* row = static_cast<const float*>(from.row(i));
      float* to = k + i / kPanel * grouped(d) * kPanel + i % kPanel;
      for (int64_t j = 0; j < d; ++j) to[j * kPanel] = row[j];
    }
    float* v = values.get<float>(padded(n) * padded(e));
    for (int64_t first = 0; first < e; first += kPanel) {
      const int64_t count = std::min<int64_t>(kPanel, e - first);
      for (int64_t i = 0; i < padded(n); ++i, v += kPanel) {
        const int64_t some = i < n ? count : 0;
        if (some > 0) std::copy_n(static_cast<const float*>(mixed.row(i)) + first, some, v);
        std::fill(v + some, v + kPanel, 0.f);
      }
    }
  }
};

class TileRows {
 public:
  TileRows(const Kernels& kernels, const Attention& a, int64_t out_stride)
      : kernels_(kernels),
        a_(a),
        out_stride_(out_stride),
        n_(padded(a.k.rows)),
        d_(grouped(a.k.columns)),
        scale_(same(a.scale)) {}

  // Rows m, m + 1, ... of a head of queries, kMaxFloatRows or fewer.
  void run(const QueryHead& query, HeadPanels& head, int64_t m, int64_t rows) {
    float* scores = scores_.get<float>(kMaxFloatRows * n_);
    score(query, head.keys.get<float>(d_ * n_), m, rows, scores);
    std::array<float, kMaxFloatRows> inverse = {};
    for (int64_t r = 0; r < rows; ++r) inverse[r] = weights(query, m + r, scores + r * n_);
    mix(scores, head.values.get<float>(n_ * padded(a_.v.columns)), rows, inverse,
        reinterpret_cast<float*>(query.out) + m * out_stride_);
  }

 private:
  void score(const QueryHead& query, const float* keys, int64_t m, int64_t rows, float* scores) {
    const FloatMatrix q = at(a_.q, query.q);
    float* x = queries_.get<float>(kMaxFloatRows * d_);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(static_cast<const float*>(q.row(m + r)), q.columns, x + r * d_);
      std::fill(x + r * d_ + q.columns, x + (r + 1) * d_, 0.f);
    }
    for (int64_t n = 0; n < n_; n += kPanel, keys += d_ * kPanel) {
      multiply({x, d_, keys, d_ / kGroup}, rows, scale_);
      for (int64_t r = 0; r < rows; ++r)
        std::copy_n(sums_ + r * kPanel, kPanel, scores + r * n_ + n);
    }
  }

  // Scores become weights; returns 1 over their sum, 0 for a row that sees no key.
  float weights(const QueryHead& query, int64_t m, float* scores) {
    const int64_t keys = a_.keys_of_row(m);
    std::fill(scores + keys, scores + n_, kHidden);
    if (a_.mask.kind != Mask::Kind::kNone) {
      float* added = mask_.get<float>(n_);
      load_mask(kernels_, at(a_.mask, query.mask), m, keys, added);
      for (int64_t n = 0; n < keys; ++n) {
        scores[n] = added[n] == kHidden ? kHidden : scores[n] + added[n];
      }
    }
    const float top = greatest(scores);
    const float sum = kernels_.attention->exponentials(scores, n_, top == kHidden ? 0.f : top);
    return sum == 0.f ? 0.f : 1.f / sum;
  }

  // A NaN among them is not seen here, and shows in the sum.
  float greatest(const float* scores) const {
    std::array<float, kPanel> tops = same(kHidden);
    for (int64_t n = 0; n < n_; n += kPanel) {
      for (int i = 0; i < kPanel; ++i) tops[i] = scores[n + i] > tops[i] ? scores[n + i] : tops[i];
    }
    return *std::max_element(tops.begin(), tops.end());
  }

  void mix(const float* weights, const float* values, int64_t rows,
           const std::array<float, kMaxFloatRows>& inverse, float* out) {
    static constexpr std::array<float, kPanel> kOnes = same(1.f);
    const int64_t e = a_.v.columns;
    for (int64_t first = 0; first < e; first += kPanel, values += n_ * kPanel) {
      multiply({weights, n_, values, n_ / kGroup}, rows, kOnes);
      const int64_t count = std::min<int64_t>(kPanel, e - first);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < count; ++i) {
          const float y = sums_[r * kPanel + i] * inverse[r];
          out[r * out_stride_ + first + i] = inverse[r] == 0.f ? 0.f : y;
        }
      }
    }
  }

  void multiply(const FloatTile& tile, int64_t rows, const std::array<float, kPanel>& scale) {
    std::fill_n(sums_, rows * kPanel, 0.f);
    kernels_.sums->weight_only->scaled[rows - 1](tile, scale.data(), sums_);
  }

  const Kernels& kernels_;
  const Attention& a_;
  int64_t out_stride_, n_, d_;
  std::array<float, kPanel> scale_;
  Scratch queries_, scores_, mask_;
  float sums_[kMaxFloatRows * kPanel];
};

}  // namespace

void attend_in_float_tiles(const Kernels& kernels, const Attention& a, int64_t out_stride) {
  const int64_t blocks = (a.q.rows + kRowsOfTask - 1) / kRowsOfTask;
  const int64_t heads = static_cast<int64_t>(a.queries.size());
  const double products = static_cast<double>(heads * a.q.rows) * static_cast<double>(a.k.rows) *
                          static_cast<double>(a.k.columns + a.v.columns);
  const auto work = static_cast<int64_t>(std::min(kStepsPerProduct * products, 1e12));
  parallel(heads * blocks, work, [&](int64_t i, int64_t end) {
    thread_local HeadPanels panels;
    TileRows tiles(kernels, a, out_stride);
    for (int64_t packed = -1; i < end; ++i) {
      const int64_t head = i / blocks, group = head / a.group(), first = i % blocks * kRowsOfTask;
      if (group != packed) panels.pack(a, a.keys[group]);
      packed = group;
      const int64_t last = std::min(a.q.rows, first + kRowsOfTask);
      for (int64_t m = first; m < last; m += kMaxFloatRows) {
        tiles.run(a.queries[head], panels, m, std::min<int64_t>(kMaxFloatRows, last - m));
      }
    }
  });
}

}  // namespace qfx::cpu
