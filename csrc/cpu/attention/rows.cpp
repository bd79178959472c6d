#include "cpu/attention/rows.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/attention/products.h"
#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int32_t kProbabilityZero = -128;  // the zero point of both bytes of a probability
constexpr int32_t kPlainOffset = 128;       // of codes that are these bytes
constexpr float kProbabilityMax = 65535.f;
constexpr int64_t kPanelsAtOnce = kKMultiple / kPanel;  // of keys, in the depth of values

}  // namespace

AttentionRows::AttentionRows(const Kernels& kernels, const Attention& attention, int64_t rows)
    : kernels_(kernels), a_(attention), width_(round_up(attention.k.rows, kPanel)) {
  thread_local RowsMemory query_memory, probability_memory;
  thread_local Scratch floats, codes, tiles;
  constexpr int64_t kLine = 16;  // floats: rows of scores shall not share cache sets
  const Format& format = format_for(kernels, Operands::kWide, rows);
  rows_ = tile_height(std::max<int64_t>(rows, 1), format.tile_rows);
  queries_ = rows_with(format, rows_, a_.q.columns, query_memory);
  probabilities_ = rows_with(format_for(kernels, Operands::kWide, 2 * rows_), 2 * rows_, width_,
                             probability_memory);
  score_stride_ = width_ + kLine;
  const int64_t query_width = round_up(a_.q.columns, kPanel);
  output_width_ = round_up(a_.v.columns, kPanel);
  const int64_t masks = attention.mask.kind == Mask::Kind::kNone ? 0 : rows_ * width_;
  scores_ = floats.get<float>(rows_ * (score_stride_ + output_width_ + kPanel) + masks +
                              kPanel * query_width);
  outputs_ = scores_ + rows_ * score_stride_;
  mask_ = outputs_ + rows_ * output_width_;
  query_floats_ = mask_ + masks;
  tops_ = query_floats_ + kPanel * query_width;
  tiles_ = tiles.get<int32_t>(kPanelsScored * rows_ * kPanel + output_width_);
  value_sums_ = tiles_ + kPanelsScored * rows_ * kPanel;
  codes_ = codes.get<int8_t>(std::max(2 * width_, kPanel * query_width));
  std::fill_n(mask_, masks, 0.f);
}

AttentionRows::~AttentionRows() {
  release(*queries_.format);
  release(*probabilities_.format);
}

void AttentionRows::cut(int64_t head, int64_t first, int64_t count) {
  parts_.clear();
  const QueryHead* query = &a_.queries[head * a_.group() + first / a_.q.rows];
  for (int64_t at = 0, m = first % a_.q.rows; at < count; ++query, m = 0) {
    const int64_t here = std::min(count - at, a_.q.rows - m);
    parts_.push_back({query, m, at, here});
    at += here;
  }
}

void AttentionRows::run(int64_t head, const HeadCodes& codes, int64_t first, int64_t count) {
  cut(head, first, count);
  PanelRange panels = {codes.k.panels(), 0};
  for (const Part& part : parts_) {
    quantize(part);
    const PanelRange seen = look(part);
    panels = {std::min(panels.first, seen.first), std::max(panels.end, seen.end)};
  }
  panels.first = std::min(panels.first, panels.end) / kPanelsAtOnce * kPanelsAtOnce;
  score(codes, count, panels);
  softmax(codes, count, panels);
  mix(codes, count, panels);
  for (const Part& part : parts_) store(part);
}

// Loads the masks; the panels outside of which no row sees a key.
PanelRange AttentionRows::look(const Part& part) {
  const Mask mask = at(a_.mask, part.head->mask);
  PanelRange all = {width_ / kPanel, 0};
  for (int64_t i = 0; i < part.count; ++i) {
    const int64_t r = part.at + i, m = part.m + i, keys = a_.keys_of_row(m);
    keys_[r] = keys;
    masks_[r] = nullptr;
    PanelRange seen = {0, (keys + kPanel - 1) / kPanel};
    if (mask.kind != Mask::Kind::kNone) {
      const bool again = i > 0 && mask.row_stride == 0 && keys == keys_[r - 1];
      masks_[r] = again ? masks_[r - 1] : mask_ + r * width_;
      if (again) continue;
      load_mask(kernels_, mask, m, keys, mask_ + r * width_);
      seen = panels_seen(masks_[r], keys);
    }
    if (seen.first < seen.end) {
      all = {std::min(all.first, seen.first), std::max(all.end, seen.end)};
    }
  }
  return all;
}

// (A3)
void AttentionRows::quantize(const Part& part) {
  const Format& format = *queries_.format;
  const FloatMatrix q = at(a_.q, part.head->q);
  const int64_t d = q.columns, depth = round_up(d, format.k_multiple);
  const int64_t width = round_up(d, kPanel);
  const bool plain = format.bytes_per_code == 1;
  uint8_t* a = queries_.a + part.at * queries_.stride;
  const PanelCodesArgs args = {.x = q.row(part.m),
                               .dtype = q.dtype,
                               .stride = q.stride * (q.dtype == Dtype::kFloat32 ? 4 : 2),
                               .rows = part.count,
                               .columns = d,
                               .center = nullptr,
                               .rotation = rotation_of(d).rotation,
                               .floats = query_floats_,
                               .codes = plain ? reinterpret_cast<int8_t*>(a) : codes_,
                               .code_stride = plain ? queries_.stride : width,
                               .padded = plain ? depth : 0,
                               .offset = static_cast<uint8_t>(plain ? format.mul_offset : 0),
                               .scale = row_scale_ + part.at};
  kernels_.attention->codes_of_panel(&args);
  for (int64_t i = 0; i < part.count; ++i) {
    const int64_t r = part.at + i;
    row_scale_[r] *= a_.scale;
    queries_.add[r] =
        plain ? 0 : format.arrange(codes_ + i * width, d, depth, a + i * queries_.stride);
  }
}

void AttentionRows::score(const HeadCodes& codes, int64_t count, const PanelRange& panels) {
  const Format& format = *queries_.format;
  const int64_t depth = round_up(a_.q.columns, format.k_multiple);
  std::fill_n(tops_, count * kPanel, -std::numeric_limits<float>::infinity());
  int64_t p = panels.first;
  const auto args_of = [&](int64_t some) {
    return ScoreArgs{.raw = tiles_,
                     .rows = count,
                     .panels = some,
                     .add = queries_.add,
                     .mul = format.mul_offset,
                     .row_scale = row_scale_,
                     .key_scale = codes.k_scale + p * kPanel,
                     .colsum = codes.k_sums + p * kPanel,
                     .first = p * kPanel,
                     .keys = keys_,
                     .mask = masks_,
                     .out = scores_ + (p - panels.first) * kPanel,
                     .stride = score_stride_,
                     .top = tops_};
  };
  if (format.scores != nullptr && seen_by_all(count) > p) {
    const ScoreArgs args = args_of(std::min(seen_by_all(count), panels.end) - p);
    format.scores[count - 1](queries_.a, queries_.stride, codes.k.panel(p),
                             kPanel * codes.k.padded_k, depth / kGroup, &args);
    p += args.panels;
  }
  for (int64_t some; p < panels.end; p += some) {
    some = std::min<int64_t>(kPanelsScored, panels.end - p);
    for (int64_t i = 0; i < some; ++i) {
      multiply_rows(queries_, count, codes.k.panel(p + i), depth, tiles_ + i * count * kPanel);
    }
    const ScoreArgs args = args_of(some);
    kernels_.attention->score(&args);
  }
  kernels_.attention->greatest(tops_, count, greatest_);
}

// Panels 0, 1, ... of which every row sees each key.
int64_t AttentionRows::seen_by_all(int64_t count) const {
  int64_t keys = width_;
  for (int64_t r = 0; r < count; ++r) keys = masks_[r] == nullptr ? std::min(keys, keys_[r]) : 0;
  return keys / kPanel;
}

// Scores -> the two bytes of each row's probabilities, arranged: after the next row has its
// weights, so that a division is not waited for. (A4), (A5)
void AttentionRows::softmax(const HeadCodes& codes, int64_t count, const PanelRange& panels) {
  const int64_t first = panels.first * kPanel, width = panels.end * kPanel - first;
  float inverse = 0.f;
  for (int64_t r = 0; r <= count; ++r) {
    const float before = inverse;
    if (r < count) {
      const int64_t keys = std::min(keys_[r] - first, width);
      const SoftmaxArgs args = {scores_ + r * score_stride_, width, keys, greatest_[r],
                                codes.v_scale + first};
      const SoftmaxSums sums = kernels_.attention->softmax(&args);
      factor_[r] = sums.sum == 0.f ? 0.f : sums.top / (kProbabilityMax * sums.sum);
      inverse = kProbabilityMax / sums.top;
    }
    if (r > 0) arrange(scores_ + (r - 1) * score_stride_, before, r - 1, count + r - 1, width);
  }
}

// The two bytes of a row's probabilities as rows `row` and `low_row`. (A5)
void AttentionRows::arrange(const float* u, float factor, int64_t row, int64_t low_row,
                            int64_t width) {
  const Format& format = *probabilities_.format;
  const int64_t depth = round_up(width, format.k_multiple);
  uint8_t* high = probabilities_.a + row * probabilities_.stride;
  uint8_t* low = probabilities_.a + low_row * probabilities_.stride;
  if (format.bytes_per_code == 1) {
    const uint8_t offset = static_cast<uint8_t>(format.mul_offset - kPlainOffset);
    kernels_.attention->probabilities(u, width, factor, offset, high, low);
    for (int64_t n = width; n < depth; ++n) high[n] = low[n] = 0;
    probabilities_.add[row] = probabilities_.add[low_row] = 0;
    return;
  }
  uint8_t* codes = reinterpret_cast<uint8_t*>(codes_);
  kernels_.attention->probabilities(u, width, factor, kPlainOffset, codes, codes + width_);
  probabilities_.add[row] = format.arrange(codes_, width, depth, high);
  probabilities_.add[low_row] = format.arrange(codes_ + width_, width, depth, low);
}

// Probabilities times values. (A6)
void AttentionRows::mix(const HeadCodes& codes, int64_t count, const PanelRange& panels) {
  const Format& format = *probabilities_.format;
  const int64_t first = panels.first * kPanel;
  const int64_t depth = round_up(panels.end * kPanel - first, format.k_multiple);
  const int32_t mul = kProbabilityZero + format.mul_offset;
  std::fill_n(value_sums_, output_width_, 0);
  for (int64_t p = panels.first; p < panels.end && mul != 0; ++p) {
    const int32_t* of_panel = codes.v_sums + p * output_width_;
    for (int64_t e = 0; e < output_width_; ++e) value_sums_[e] += of_panel[e];
  }
  for (int64_t e = 0; e < output_width_; e += kPanel) {
    const int8_t* panel = codes.v.panel(e / kPanel) + first * kPanel;
    multiply_rows(probabilities_, 2 * count, panel, depth, tiles_);
    const MixArgs args = {
        tiles_, tiles_ + count * kPanel, count,   probabilities_.add, probabilities_.add + count,
        mul,    value_sums_ + e,         factor_, outputs_ + e,       output_width_};
    kernels_.attention->mix(&args);
  }
}

void AttentionRows::store(const Part& part) const {
  const int64_t e = a_.v.columns, element = a_.dtype == Dtype::kFloat32 ? 4 : 2;
  const FinishArgs args = {outputs_ + part.at * output_width_,
                           output_width_,
                           part.count,
                           e,
                           rotation_of(e).rotation,
                           a_.dtype,
                           part.head->out + part.m * e * element};
  kernels_.attention->finish_rows(&args);
}

}  // namespace qfx::cpu
