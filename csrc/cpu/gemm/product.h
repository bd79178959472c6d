// An integer product as operators use it: rows of codes or of floats made ready for the kernels,
// and tiles stored as exact sums or through the epilogue.
#pragma once

#include <algorithm>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/quantize.h"

namespace qfx::cpu {

// Stores the exact sums in out[M][N].
struct IntegerSink final : TileSink {
  const PackedWeight& w;
  const Rows& rows;
  int32_t* out;

  IntegerSink(const PackedWeight& w, const Rows& rows, int32_t* out) : w(w), rows(rows), out(out) {}

  void load_panel(int64_t p, Panel* panel) const override;
  void tile(const int32_t* raw, int64_t m, int count, int64_t p, const Panel& panel) const override;
};

// Where and how an operator's float result is written.
struct FloatOutput {
  const float* bias;  // or null
  Activation activation;
  Dtype dtype;
  char* data;          // [M, N]
  int64_t bytes = 0;   // of all of it, where that is known
  int64_t stride = 0;  // from row to row in elements; 0: N
  // Added before the activation, of the dtype of data and as it lies; or null. Linears of floats
  // that are quantized read it.
  const char* residual = nullptr;

  int64_t element() const { return dtype == Dtype::kFloat32 ? 4 : 2; }
  int64_t row_of(const PackedWeight& w) const { return stride == 0 ? w.n : stride; }
  // What is added to the outputs `bytes` from the first one on, or null.
  const char* residual_at(int64_t bytes) const {
    return residual == nullptr ? nullptr : residual + bytes;
  }
};

// Whether outputs go to memory in whole lines, as they leave the caches before they are read.
bool past_caches(const FloatOutput& to, const PackedWeight& w, const Tuning& tuning);

// The parameters of panel p's columns.
void load_columns(const PackedWeight& w, const FloatOutput& to, int64_t p, Panel* panel);

// Applies the epilogue (E1) while the tile is in cache. `first` is the output row of rows' row 0.
struct FloatSink final : TileSink {
  const Kernels& kernels;
  const PackedWeight& w;
  const Rows& rows;
  const FloatOutput& to;
  const float* row_scale;
  int64_t scale_stride, first;

  FloatSink(const Kernels& kernels, const PackedWeight& w, const Rows& rows, const FloatOutput& to,
            const float* row_scale, int64_t scale_stride, int64_t first)
      : kernels(kernels),
        w(w),
        rows(rows),
        to(to),
        row_scale(row_scale),
        scale_stride(scale_stride),
        first(first) {}

  void load_panel(int64_t p, Panel* panel) const override;
  void fetch_panels(int64_t p, int64_t end) const override;
  void tile(const int32_t* raw, int64_t m, int count, int64_t p, const Panel& panel) const override;
  bool epilogue_of(const int32_t* raw, int64_t m, int count, int64_t p, const Panel& panel,
                   EpilogueArgs* args) const override;
};

// The columns of panel p that the weight has.
inline int columns_of(const PackedWeight& w, int64_t p) {
  return static_cast<int>(std::min<int64_t>(kPanel, w.n - p * kPanel));
}

// What is known of the codes: narrow ones lie in [-64, 63].
Operands operands_of(const PackedWeight& w, bool narrow_codes);

// The fastest format that holds the codes q [count, K].
const Format& format_of_codes(const Kernels& kernels, const PackedWeight& w, const int8_t* q,
                              int64_t count);

// Codes q [M, K], or rows order[m] of q, arranged for the kernels: in the fastest format that holds
// them unless one is given.
struct CodeRows final : RowSource {
  const PackedWeight& w;
  const int8_t* q;
  const int32_t* zero_points;
  int64_t zero_stride;
  const int32_t* order = nullptr;

  CodeRows(const Format& format, const PackedWeight& w, const int8_t* q, const int32_t* order,
           const int32_t* zero_points, int64_t zero_stride, int64_t count, RowsMemory& memory);
  CodeRows(const Kernels& kernels, const PackedWeight& w, const int8_t* q,
           const int32_t* zero_points, int64_t zero_stride, int64_t count,
           RowsMemory& memory = rows_memory());

  void fill(int64_t begin, int64_t end) const override;
  int64_t work() const override;
};

// x [M, K], quantized row by row and arranged. Each row has its own code, which is chosen here and
// whose scale goes to scales[m]; or all have `shared`, whose scales are there already.
struct FloatRows final : RowSource {
  const Kernels& kernels;
  const PackedWeight& w;
  FloatMatrix x;
  CodeSpec spec;
  const TensorCode* shared;
  float* scales;

  FloatRows(const Kernels& kernels, const PackedWeight& w, const FloatMatrix& x,
            const CodeSpec& spec, const TensorCode* shared, float* scales,
            RowsMemory& memory = rows_memory());

  void fill(int64_t begin, int64_t end) const override;
  int64_t work() const override;
};

// Runs f(first, count) over the rows, a bounded number at a time, so that the memory for arranged
// rows stays bounded too.
template <typename F>
void in_chunks(const Kernels& kernels, const PackedWeight& w, int64_t rows, const F& f) {
  const int64_t step = rows_at_once(kernels, w, rows);
  for (int64_t first = 0; first < rows; first += step) f(first, std::min(step, rows - first));
}

}  // namespace qfx::cpu
