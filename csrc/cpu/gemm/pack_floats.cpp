#include "cpu/gemm/pack_floats.h"

#include <algorithm>
#include <cstring>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

// One panel: columns n = 0, 1, ... of a part of w.
struct PanelOut {
  float* scale;     // [columns]
  int32_t* colsum;  // [32]
  int8_t* block;
};

void pack_rows(const Kernels& kernels, const StridedFloats& w, const CodeSpec& spec,
               const PanelOut& out) {
  thread_local Scratch scratch;
  int8_t* q = scratch.get<int8_t>(kPanel * w.k);
  const FloatMatrix rows = {w.data, w.dtype, w.n, w.k, w.stride_n};
  RowCode codes[kRowsAtOnce];
  for (int64_t n = 0; n < w.n; n += kRowsAtOnce) {
    const int64_t count = std::min<int64_t>(kRowsAtOnce, w.n - n);
    quantize_rows(kernels, rows, spec, nullptr, n, count, codes, q + n * w.k, w.k);
    for (int64_t r = 0; r < count; ++r) out.scale[n + r] = codes[r].scale;
  }
  pack_panel(q, w.n, w.k, w.k, 1, out.colsum, out.block);
}

// x[Kp][32] in float32, zero padded.
const float* columns_as_floats(const Kernels& kernels, const StridedFloats& w) {
  thread_local Scratch scratch;
  float* x = scratch.get<float>(padded_k(w.k) * kPanel);
  const FloatMatrix rows = {w.data, w.dtype, w.k, w.n, w.stride_k};
  for (int64_t k = 0; k < w.k; ++k) {
    float* to = x + k * kPanel;
    if (w.dtype == Dtype::kFloat32) std::memcpy(to, rows.row(k), w.n * sizeof(float));
    if (w.dtype != Dtype::kFloat32) kernels.row->widen(rows.row(k), w.dtype, w.n, to);
    std::fill(to + w.n, to + kPanel, 0.f);
  }
  std::fill(x + w.k * kPanel, x + padded_k(w.k) * kPanel, 0.f);
  return x;
}

void pack_columns(const Kernels& kernels, const StridedFloats& w, const CodeSpec& spec,
                  const PanelOut& out) {
  const float* x = columns_as_floats(kernels, w);
  int32_t magnitude[kPanel];
  kernels.row->range_of_columns(x, w.k, magnitude);
  ColumnCodes codes = {};
  for (int64_t n = 0; n < w.n; ++n) {
    const RowCode code = code_of({magnitude[n], 0, 0}, spec);
    codes.inverse[n] = code.inverse;
    codes.finite[n] = code.finite ? -1 : 0;
    codes.qmax = code.qmax;
    out.scale[n] = code.scale;
  }
  kernels.row->quantize_columns(x, padded_k(w.k) / kGroup, &codes, out.block, out.colsum);
}

}  // namespace

FloatPanels::FloatPanels(const Kernels& kernels, const StridedFloats& w, const CodeSpec& spec,
                         PackMemory& memory)
    : PanelSource({w.n, w.k, padded_k(w.k), spec.bits < 8, nullptr, nullptr}),
      kernels(kernels),
      w(w),
      spec(spec) {
  const int64_t padded_n = round_up(w.n, kPanel);
  scale = memory.scales.get<float>(padded_n);
  colsum = memory.colsums.get<int32_t>(padded_n);
  blocks = memory.blocks.get<int8_t>(padded_n * padded_k(w.k));
  std::fill(scale + w.n, scale + padded_n, 0.f);
  weight.scale = scale;
  weight.colsum = colsum;
  weight.blocks = blocks;
}

void FloatPanels::fill(int64_t begin, int64_t end) const {
  const int64_t bytes = w.dtype == Dtype::kFloat32 ? 4 : 2;
  const auto pack = w.stride_k == 1 ? pack_rows : pack_columns;
  for (int64_t n = begin * kPanel; n < end * kPanel; n += kPanel) {
    StridedFloats panel = w;
    panel.data = static_cast<const char*>(w.data) + n * w.stride_n * bytes;
    panel.n = std::min<int64_t>(kPanel, w.n - n);
    pack(kernels, panel, spec, {scale + n, colsum + n, blocks + n * weight.padded_k});
  }
}

int64_t FloatPanels::work() const {
  constexpr int64_t kStepsPerElement = 16;
  return w.n * w.k * kStepsPerElement;
}

PackedWeight pack_floats(const Kernels& kernels, const StridedFloats& w, const CodeSpec& spec,
                         PackMemory& memory) {
  const FloatPanels panels(kernels, w, spec, memory);
  parallel(panels.weight.panels(), panels.work(),
           [&](int64_t begin, int64_t end) { panels.fill(begin, end); });
  return panels.weight;
}

}  // namespace qfx::cpu
