#include "cpu/attention/head_gradient.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/gemm/quantize.h"

namespace qfx::cpu {
namespace {

// Parts of a piece of memory, one after the other.
template <typename T>
class Cut {
 public:
  explicit Cut(T* memory) : memory_(memory) {}
  T* take(int64_t count) { return std::exchange(memory_, memory_ + round_up(count, 64)); }

 private:
  T* memory_;
};

}  // namespace

HeadGradient::HeadGradient(const Kernels& kernels, const AttentionGradient& all)
    : kernels_(kernels),
      all_(all),
      a_(all.forward),
      n_(a_.k.rows),
      padded_n_(round_up(n_, kPanel)),
      depth_n_(padded_k(n_)),
      stride_(depth_n_ + 16) {  // floats: rows shall not share cache sets
  const int64_t d = round_up(a_.q.columns, kPanel), e = round_up(a_.v.columns, kPanel);
  const int64_t depth_d = padded_k(d), depth_e = padded_k(e);
  const int64_t widest = std::max({depth_d, depth_e, depth_n_, kRows});
  const Format& format = format_for(kernels, Operands::kWide, kRows);
  queries_.rows = rows_with(format, kRows, a_.q.columns, queries_.memory);
  gradients_.rows = rows_with(format, kRows, a_.v.columns, gradients_.memory);
  keys_.reserve(kernels, n_, a_.k.columns);
  of_q_.reserve(kernels, kRows, a_.q.columns);
  of_g_.reserve(kernels, kRows, a_.v.columns);
  partial_size_ = (d + e) * padded_n_;
  Cut<float> floats(floats_.get<float>(2 * kRows * stride_ + kRows * (padded_n_ + kPanel + d) +
                                       kPanel * widest + 3 * padded_n_ + 2 * partial_size_ + d + e +
                                       14 * 64));
  weights_ = floats.take(kRows * stride_), scores_ = floats.take(kRows * stride_);
  masks_ = floats.take(kRows * padded_n_), tops_ = floats.take(kRows * kPanel);
  dq_ = floats.take(kRows * d), work_ = floats.take(kPanel * widest);
  ones_ = floats.take(padded_n_), k_.scale = floats.take(padded_n_);
  v_.scale = floats.take(padded_n_), total_ = floats.take(partial_size_);
  dk_ = floats.take(partial_size_), dv_ = dk_ + d * padded_n_;
  k_mean_ = floats.take(d), v_mean_ = floats.take(e);
  Cut<int8_t> bytes(bytes_.get<int8_t>(padded_n_ * (depth_d + depth_e + 2 * kRows) +
                                       2 * kRows * depth_n_ + kRows * widest + 8 * 64));
  k_.blocks = bytes.take(padded_n_ * depth_d), v_.blocks = bytes.take(padded_n_ * depth_e);
  for (Codes* codes : {&weights_codes_, &score_codes_}) {
    codes->rows = bytes.take(kRows * depth_n_), codes->panels = bytes.take(padded_n_ * kRows);
  }
  key_blocks_ = bytes.take(kRows * widest);
  Cut<int32_t> integers(
      integers_.get<int32_t>(kPanelsScored * kRows * kPanel + 4 * padded_n_ + kRows + 8 * 64));
  tiles_ = integers.take(kPanelsScored * kRows * kPanel);
  k_.sums = integers.take(padded_n_), v_.sums = integers.take(padded_n_);
  weights_codes_.sums = integers.take(padded_n_), score_codes_.sums = integers.take(padded_n_);
  key_sums_ = integers.take(kRows);
  k_.depth = depth_d, v_.depth = depth_e;
  std::fill_n(ones_, padded_n_, 1.f);
}

HeadGradient::~HeadGradient() {
  for (const TransposedCodes* codes : {&keys_, &of_q_, &of_g_}) codes->release();
  release(*queries_.rows.format);
}

void HeadGradient::run(int64_t head) {
  const int64_t first = head * a_.group();
  if (a_.group() == 1) {
    add_query(first);
    return store_both(head, dk_);
  }
  std::fill_n(total_, partial_size_, 0.f);
  for (int64_t i = 0; i < a_.group(); ++i) {
    add_query(first + i);
    add_to_total(dk_);
  }
  store_both(head, total_);
}

void HeadGradient::run_query(int64_t query, float* sums) {
  add_query(query);
  std::copy_n(dk_, partial_size_, sums);
}

void HeadGradient::store(int64_t head, const float* parts) {
  std::fill_n(total_, partial_size_, 0.f);
  for (int64_t i = 0; i < a_.group(); ++i) add_to_total(parts + i * partial_size_);
  store_both(head, total_);
}

void HeadGradient::add_to_total(const float* part) {
  for (int64_t i = 0; i < partial_size_; ++i) total_[i] += part[i];
}

void HeadGradient::store_both(int64_t head, const float* sums) {
  store_keys(sums, a_.k, all_.keys[head].k);
  store_keys(sums + (dv_ - dk_), a_.v, all_.keys[head].v);
}

void HeadGradient::add_query(int64_t query) {
  const char* mask = a_.queries[query].mask;
  const int64_t head = query / a_.group();
  if (head != head_) {
    open(head, mask);
  } else if (mask != centered_under_) {
    center_keys(mask);
  }
  std::fill_n(dk_, partial_size_, 0.f);
  for (int64_t m = 0; m < a_.q.rows; m += kRows) {
    add_block(query, m, std::min(kRows, a_.q.rows - m));
  }
}

// The codes of keys, for queries with this mask. (A2) (A3)
void HeadGradient::center_keys(const char* mask) {
  const void* keys = a_.keys[head_].k;
  float* center = centers_.get<float>(round_up(a_.k.columns, kPanel));
  bool centered = false;
  find_center(kernels_, a_, keys, mask, center, &centered);
  k_.center = centered ? center : nullptr;
  open_keys(at(a_.k, keys), k_);
  centered_under_ = mask;
}

// Those codes, those of values (A11), and of keys whose rows are contracted (A14).
void HeadGradient::open(int64_t head, const char* mask) {
  const FloatMatrix k = at(a_.k, a_.keys[head].k), v = at(a_.v, a_.keys[head].v);
  head_ = head;
  center_keys(mask);
  v_.center = mean(v, v_mean_);
  open_keys(v, v_);
  mean(k, k_mean_);
  for (int64_t n = 0; n < padded_n_; ++n) {  // a faulty key counts as the mean: who sees it, knows
    const bool counts = n < n_ && std::isfinite(k_.scale[n]);
    keys_.set_row(n, counts ? row_as_floats(kernels_, k, n) : k_mean_, k_mean_, 1.f);
  }
  keys_.quantize(padded_n_, depth_n_);
}

// Of all rows, summed in their order, where a NaN or an infinity counts as 0; zero padded.
const float* HeadGradient::mean(const FloatMatrix& x, float* out) const {
  std::fill_n(out, round_up(x.columns, kPanel), 0.f);
  for (int64_t n = 0; n < x.rows; ++n) {
    const float* __restrict row = row_as_floats(kernels_, x, n);
    for (int64_t i = 0; i < x.columns; ++i) out[i] += row[i] - row[i] == 0.f ? row[i] : 0.f;
  }
  for (int64_t i = 0; i < x.columns; ++i) out[i] /= static_cast<float>(x.rows);
  return out;
}

void HeadGradient::open_keys(const FloatMatrix& x, const KeyPanels& panels) const {
  for (int64_t n = 0; n < n_; n += kPanel) {
    pack_as_keys(kernels_, x, n, std::min<int64_t>(kPanel, n_ - n), panels);
  }
}

void HeadGradient::add_block(int64_t query, int64_t first, int64_t count) {
  const FloatMatrix q = at(a_.q, a_.queries[query].q), g = at(all_.g, all_.heads[query]);
  panels_ = look(query, first, count);
  if (panels_ == 0) return store_queries(query, first, count);
  quantize(q, first, count, &queries_);
  quantize(g, first, count, &gradients_);
  for (int64_t r = 0; r < count; ++r) queries_.scale[r] *= a_.scale;
  score(queries_, k_, count, true, weights_);
  score(gradients_, v_, count, false, scores_);
  differentiate(count);
  encode(weights_, count, &weights_codes_);
  encode(scores_, count, &score_codes_);
  for (int64_t r = 0; r < count; ++r) {
    weight_factor_[r] = weights_codes_.scale[r] * inverse_[r];
    score_factor_[r] = score_codes_.scale[r] * (inverse_[r] * a_.scale);
  }
  contract(g, first, count, weights_codes_, weight_factor_, &of_g_, dv_);
  contract(q, first, count, score_codes_, score_factor_, &of_q_, dk_);
  store_queries(query, first, count);
}

// The gradients of the block's queries. (A14)
void HeadGradient::store_queries(int64_t query, int64_t first, int64_t count) {
  const int64_t d = a_.q.columns, padded = round_up(d, kPanel), depth = padded_k(panels_ * kPanel);
  std::fill_n(dq_, kRows * padded, 0.f);
  if (panels_ > 0) keys_.arrange(depth);
  for (int64_t r = 0; panels_ > 0 && r < count; r += kPanel) {
    kernels_.attention->interleave_keys(score_codes_.rows + r * depth_n_, depth_n_, depth / kGroup,
                                        key_blocks_, key_sums_);
    std::fill_n(work_, d * kPanel, 0.f);
    keys_.add_product(key_blocks_, key_sums_, work_, kPanel);
    for (int64_t i = 0; i < std::min<int64_t>(kPanel, count - r); ++i) {
      for (int64_t c = 0; c < d; ++c) {
        dq_[(r + i) * padded + c] = work_[c * kPanel + i] * score_factor_[r + i];
      }
    }
  }
  const int64_t element = a_.q.dtype == Dtype::kFloat32 ? 4 : 2;
  const FinishArgs args = {
      dq_, padded, count, d, 0, a_.q.dtype, a_.queries[query].out + first * d * element};
  kernels_.attention->finish_rows(&args);
}

void HeadGradient::store_keys(const float* transposed, const FloatMatrix& sizes, char* out) {
  const int64_t columns = sizes.columns, padded = round_up(columns, kPanel);
  const int64_t element = sizes.dtype == Dtype::kFloat32 ? 4 : 2;
  float* rows = work_;
  std::fill_n(rows, kPanel * padded, 0.f);
  for (int64_t n = 0; n < n_; n += kPanel) {
    const int64_t count = std::min<int64_t>(kPanel, n_ - n);
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t i = 0; i < count; ++i) rows[i * padded + c] = transposed[c * padded_n_ + n + i];
    }
    const FinishArgs args = {
        rows, padded, count, columns, 0, sizes.dtype, out + n * columns * element};
    kernels_.attention->finish_rows(&args);
  }
}

}  // namespace qfx::cpu
