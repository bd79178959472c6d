#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/attention/head_gradient.h"
#include "cpu/gemm/quantize.h"

namespace qfx::cpu {

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

}  // namespace qfx::cpu
