#include "cpu/attention/head_gradient.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
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
  Cut<float> floats(floats_.get<float>(2 * kRows * stride_ + kRows * (padded_n_ + kPanel + d) +
                                       kPanel * widest + (3 + d + e) * padded_n_ + d + e +
                                       14 * 64));
  weights_ = floats.take(kRows * stride_), scores_ = floats.take(kRows * stride_);
  masks_ = floats.take(kRows * padded_n_), tops_ = floats.take(kRows * kPanel);
  dq_ = floats.take(kRows * d), work_ = floats.take(kPanel * widest);
  ones_ = floats.take(padded_n_), k_.scale = floats.take(padded_n_);
  v_.scale = floats.take(padded_n_), dk_ = floats.take(d * padded_n_);
  dv_ = floats.take(e * padded_n_), k_mean_ = floats.take(d), v_mean_ = floats.take(e);
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

void HeadGradient::run(int64_t head) {
  open(head);
  for (int64_t i = 0; i < a_.group(); ++i) {
    const int64_t query = head * a_.group() + i;
    const char* mask = a_.queries[query].mask;
    if (i == 0 || mask != a_.queries[query - 1].mask) center_keys(head, mask);
    for (int64_t m = 0; m < a_.q.rows; m += kRows) {
      add_block(query, m, std::min(kRows, a_.q.rows - m));
    }
  }
  store_keys(dk_, a_.k, all_.keys[head].k);
  store_keys(dv_, a_.v, all_.keys[head].v);
  for (const TransposedCodes* codes : {&keys_, &of_q_, &of_g_}) codes->release();
  release(*queries_.rows.format);
}

// The codes of keys, for queries with this mask. (A2) (A3)
void HeadGradient::center_keys(int64_t head, const char* mask) {
  const void* keys = a_.keys[head].k;
  float* center = centers_.get<float>(round_up(a_.k.columns, kPanel));
  bool centered = false;
  find_center(kernels_, a_, keys, mask, center, &centered);
  k_.center = centered ? center : nullptr;
  open_keys(at(a_.k, keys), k_);
}

// The codes of values (A11), and of keys whose rows are contracted (A14).
void HeadGradient::open(int64_t head) {
  const FloatMatrix k = at(a_.k, a_.keys[head].k), v = at(a_.v, a_.keys[head].v);
  v_.center = mean(v, v_mean_);
  open_keys(v, v_);
  k_.center = nullptr;
  open_keys(k, k_);  // whose scales say which keys are faulty
  mean(k, k_mean_);
  for (int64_t n = 0; n < padded_n_; ++n) {  // a faulty key counts as the mean: who sees it, knows
    const bool counts = n < n_ && std::isfinite(k_.scale[n]);
    keys_.set_row(n, counts ? row_as_floats(kernels_, k, n) : k_mean_, k_mean_, 1.f);
  }
  keys_.quantize(padded_n_, depth_n_);
  std::fill_n(dk_, round_up(k.columns, kPanel) * padded_n_, 0.f);
  std::fill_n(dv_, round_up(v.columns, kPanel) * padded_n_, 0.f);
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

// Loads the masks of the rows; the panels beyond which none sees a key.
int64_t HeadGradient::look(int64_t query, int64_t first, int64_t count) {
  const Mask mask = at(a_.mask, a_.queries[query].mask);
  int64_t end = 0;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t keys = a_.keys_of_row(first + r);
    seen_[r] = keys;
    mask_[r] = nullptr;
    if (mask.kind != Mask::Kind::kNone) {
      float* loaded = masks_ + r * padded_n_;
      std::fill(loaded + keys / kPanel * kPanel, loaded + padded_n_, 0.f);
      load_mask(kernels_, mask, first + r, keys, loaded);
      mask_[r] = loaded;
    }
    end = std::max(end, (keys + kPanel - 1) / kPanel);
  }
  return end;
}

// (A3)
void HeadGradient::quantize(const FloatMatrix& x, int64_t first, int64_t count, Operand* out) {
  const Format& format = *out->rows.format;
  const int64_t stride = padded_k(x.columns), depth = round_up(x.columns, format.k_multiple);
  int8_t* codes = key_blocks_;  // which nobody needs yet
  for (int64_t r = 0; r < count; r += kPanel) {
    const PanelCodesArgs args = {.x = x.row(first + r),
                                 .dtype = x.dtype,
                                 .stride = x.stride * (x.dtype == Dtype::kFloat32 ? 4 : 2),
                                 .rows = std::min<int64_t>(kPanel, count - r),
                                 .columns = x.columns,
                                 .center = nullptr,
                                 .rotation = rotation_of(x.columns).rotation,
                                 .floats = work_,
                                 .codes = codes,
                                 .code_stride = stride,
                                 .padded = stride,
                                 .offset = 0,
                                 .scale = out->scale + r};
    kernels_.attention->codes_of_panel(&args);
    for (int64_t i = 0; i < args.rows; ++i) {
      out->rows.add[r + i] = format.arrange(codes + i * stride, x.columns, depth,
                                            out->rows.a + (r + i) * out->rows.stride);
    }
  }
}

// Products of rows with the keys that the block sees, as floats. (A3)
void HeadGradient::score(const Operand& rows, const KeyPanels& panels, int64_t count, bool masked,
                         float* out) {
  const Format& format = *rows.rows.format;
  const int64_t depth = round_up(masked ? a_.q.columns : a_.v.columns, format.k_multiple);
  int64_t all_keys[kRows];
  const float* no_masks[kRows] = {};
  std::fill_n(all_keys, count, panels_ * kPanel);
  std::fill_n(tops_, count * kPanel, -std::numeric_limits<float>::infinity());
  for (int64_t p = 0, some; p < panels_; p += some) {
    some = std::min<int64_t>(kPanelsScored, panels_ - p);
    for (int64_t i = 0; i < some; ++i) {
      multiply_rows(rows.rows, count, panels.blocks + (p + i) * kPanel * panels.depth, depth,
                    tiles_ + i * count * kPanel);
    }
    const ScoreArgs args = {.raw = tiles_,
                            .rows = count,
                            .panels = some,
                            .add = rows.rows.add,
                            .mul = format.mul_offset,
                            .row_scale = rows.scale,
                            .key_scale = panels.scale + p * kPanel,
                            .colsum = panels.sums + p * kPanel,
                            .first = p * kPanel,
                            .keys = masked ? seen_ : all_keys,
                            .mask = masked ? mask_ : no_masks,
                            .out = out + p * kPanel,
                            .stride = stride_,
                            .top = tops_};
    kernels_.attention->score(&args);
  }
  if (!masked) return;
  float greatest[kRows];
  kernels_.attention->greatest(tops_, count, greatest);
  for (int64_t r = 0; r < count; ++r) {  // (A4)
    const SoftmaxArgs args = {out + r * stride_, panels_ * kPanel, seen_[r], greatest[r], ones_};
    const float sum = kernels_.attention->softmax(&args).sum;
    inverse_[r] = sum == 0.f ? 0.f : 1.f / sum;
  }
}

// (A12)
void HeadGradient::differentiate(int64_t count) {
  for (int64_t r = 0; r < count; ++r) {
    const ScoreGradientArgs args = {weights_ + r * stride_, scores_ + r * stride_, panels_ * kPanel,
                                    inverse_[r]};
    kernels_.attention->score_gradient(&args);
  }
}

// Codes of rows [count, 32 panels_], and the same as panels whose rows are contracted. (A13)
void HeadGradient::encode(const float* x, int64_t count, Codes* out) {
  const int64_t width = panels_ * kPanel, padded = round_up(count, kPanel);
  for (int64_t r = 0; r < count; r += kPanel) {
    const PanelCodesArgs args = {.x = x + r * stride_,
                                 .dtype = Dtype::kFloat32,
                                 .stride = stride_ * static_cast<int64_t>(sizeof(float)),
                                 .rows = std::min<int64_t>(kPanel, count - r),
                                 .columns = width,
                                 .center = nullptr,
                                 .rotation = 0,
                                 .floats = work_,
                                 .codes = out->rows + r * depth_n_,
                                 .code_stride = depth_n_,
                                 .padded = padded_k(width),
                                 .offset = 0,
                                 .scale = out->scale + r};
    kernels_.attention->codes_of_panel(&args);
  }
  std::memset(out->rows + count * depth_n_, 0, (padded - count) * depth_n_);
  for (int64_t p = 0; p < panels_; ++p) {
    int8_t* panel = out->panels + p * kPanel * kRows;
    int32_t *sums = out->sums + p * kPanel, more[kPanel];
    for (int64_t r = 0; r < padded; r += kPanel) {
      int32_t* to = r == 0 ? sums : more;
      kernels_.attention->interleave_values(out->rows + r * depth_n_ + p * kPanel, depth_n_,
                                            panel + r * kPanel, to);
      for (int n = 0; r > 0 && n < kPanel; ++n) sums[n] += more[n];
    }
    std::memset(panel + padded * kPanel, 0, (kRows - padded) * kPanel);
  }
}

// out += (factor x)^T codes, over the rows of the block. (A13)
void HeadGradient::contract(const FloatMatrix& x, int64_t first, int64_t count, const Codes& codes,
                            const float* factor, TransposedCodes* left, float* out) {
  const int64_t padded = round_up(count, kPanel);
  for (int64_t r = 0; r < count; ++r) {
    left->set_row(r, row_as_floats(kernels_, x, first + r), nullptr, factor[r]);
  }
  const float* any = row_as_floats(kernels_, x, first);
  for (int64_t r = count; r < padded; ++r) left->set_row(r, any, any, 0.f);
  left->quantize(padded, kRows);
  left->arrange(kRows);
  for (int64_t p = 0; p < panels_; ++p) {
    left->add_product(codes.panels + p * kPanel * kRows, codes.sums + p * kPanel, out + p * kPanel,
                      padded_n_);
  }
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
