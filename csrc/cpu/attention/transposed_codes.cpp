#include "cpu/attention/transposed_codes.h"

#include "cpu/gemm/pack.h"
#include "cpu/kernels/tables/attention.h"

namespace qfx::cpu {

void TransposedCodes::reserve(const Kernels& kernels, int64_t rows, int64_t columns) {
  constexpr int64_t kLine = 16;  // floats: columns shall not share cache sets
  kernels_ = &kernels;
  columns_ = columns;
  code_stride_ = padded_k(rows);
  stride_ = code_stride_ + kLine;
  x_ = floats_.get<float>((columns + kPanel) * stride_ + columns);
  work_ = x_ + columns * stride_;
  scale_ = work_ + kPanel * stride_;
  q_ = codes_.get<int8_t>(columns * code_stride_);
  tile_ = tiles_.get<int32_t>(columns * kPanel);
  rows_ = rows_with(format_for(kernels, Operands::kWide, columns), columns, code_stride_, memory_);
}

void TransposedCodes::set_row(int64_t r, const float* x, const float* center, float factor) {
  float* out = x_ + r;
  if (center == nullptr) {
    for (int64_t c = 0; c < columns_; ++c) out[c * stride_] = x[c] * factor;
  } else {
    for (int64_t c = 0; c < columns_; ++c) out[c * stride_] = (x[c] - center[c]) * factor;
  }
}

void TransposedCodes::quantize(int64_t rows, int64_t depth) {
  for (int64_t c = 0; c < columns_; c += kPanel) {
    const PanelCodesArgs args = {.x = x_ + c * stride_,
                                 .dtype = Dtype::kFloat32,
                                 .stride = stride_ * static_cast<int64_t>(sizeof(float)),
                                 .rows = std::min<int64_t>(kPanel, columns_ - c),
                                 .columns = rows,
                                 .center = nullptr,
                                 .rotation = 0,
                                 .floats = work_,
                                 .codes = q_ + c * code_stride_,
                                 .code_stride = code_stride_,
                                 .padded = depth,
                                 .offset = 0,
                                 .scale = scale_ + c};
    kernels_->attention->codes_of_panel(&args);
  }
}

void TransposedCodes::arrange(int64_t depth) {
  depth_ = depth;
  for (int64_t c = 0; c < columns_; ++c) {
    rows_.add[c] =
        rows_.format->arrange(q_ + c * code_stride_, depth, depth, rows_.a + c * rows_.stride);
  }
}

void TransposedCodes::add_product(const int8_t* panel, const int32_t* sums, float* out,
                                  int64_t stride) {
  multiply_rows(rows_, columns_, panel, depth_, tile_);
  uint32_t zero[kPanel];
  for (int n = 0; n < kPanel; ++n) {
    zero[n] = static_cast<uint32_t>(rows_.format->mul_offset) * static_cast<uint32_t>(sums[n]);
  }
  for (int64_t c = 0; c < columns_; ++c, out += stride) {
    const int32_t* __restrict raw = tile_ + c * kPanel;
    const uint32_t add = static_cast<uint32_t>(rows_.add[c]);
    const float scale = scale_[c];
    float* __restrict y = out;
    for (int n = 0; n < kPanel; ++n) {
      const uint32_t acc = static_cast<uint32_t>(raw[n]) + add - zero[n];
      y[n] += scale * static_cast<float>(static_cast<int32_t>(acc));
    }
  }
}

}  // namespace qfx::cpu
