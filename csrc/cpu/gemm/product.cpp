#include "cpu/gemm/product.h"

#include <cstring>

#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 16;  // of quantizing and arranging, in parallel.h's unit

void load_colsum(const PackedWeight& w, int64_t p, Panel* panel) {
  std::memcpy(panel->colsum, w.sums(p), sizeof(panel->colsum));
}

void load_bias(const float* from, const PackedWeight& w, int64_t p, float (&to)[kPanel]) {
  const int columns = columns_of(w, p);
  if (columns == kPanel) {  // by a few instructions
    std::memcpy(to, from + p * kPanel, sizeof(to));
  } else {
    std::fill(std::copy_n(from + p * kPanel, columns, to), to + kPanel, 0.f);
  }
}

// Whether all codes lie in [-64, 63].
bool all_narrow(const int8_t* q, int64_t count) {
  constexpr int64_t kBlock = 4096;  // wide codes show early
  for (int64_t i = 0; i < count; i += kBlock) {
    unsigned outside = 0;
    for (int64_t j = i; j < std::min(i + kBlock, count); ++j) {
      outside |= static_cast<uint8_t>(q[j] + 64) & 0x80;
    }
    if (outside != 0) return false;
  }
  return true;
}

}  // namespace

Operands operands_of(const PackedWeight& w, bool narrow_codes) {
  if (narrow_codes) return w.narrow ? Operands::kNarrow : Operands::kNarrowCodes;
  return w.narrow ? Operands::kNarrowWeight : Operands::kWide;
}

void IntegerSink::load_panel(int64_t p, Panel* panel) const { load_colsum(w, p, panel); }

void IntegerSink::tile(const int32_t* raw, int64_t m, int count, int64_t p,
                       const Panel& panel) const {
  for (int r = 0; r < count; ++r, ++m, raw += kPanel) {
    const uint32_t add = static_cast<uint32_t>(rows.add[m]),
                   mul = static_cast<uint32_t>(rows.mul[m]);
    for (int n = 0; n < columns_of(w, p); ++n) {
      const uint32_t colsum = static_cast<uint32_t>(panel.colsum[n]);
      out[m * w.n + p * kPanel + n] =
          static_cast<int32_t>(static_cast<uint32_t>(raw[n]) + add - mul * colsum);
    }
  }
}

bool past_caches(const FloatOutput& to, const PackedWeight& w, const Tuning& tuning) {
  constexpr int64_t kLine = 64;
  return to.bytes >= tuning.far_bytes && to.row_of(w) * to.element() % kLine == 0 &&
         reinterpret_cast<uintptr_t>(to.data) % kLine == 0;
}

void load_columns(const PackedWeight& w, const FloatOutput& to, int64_t p, Panel* panel) {
  load_colsum(w, p, panel);
  panel->has_bias = to.bias != nullptr;
  std::memcpy(panel->scale, w.scales(p), sizeof(panel->scale));
  if (panel->has_bias) load_bias(to.bias, w, p, panel->bias);
}

void FloatSink::load_panel(int64_t p, Panel* panel) const { load_columns(w, to, p, panel); }

void FloatSink::fetch_panels(int64_t p, int64_t end) const {
  constexpr int64_t kLine = 16;  // numbers
  for (; p < end; ++p) {
    for (int64_t n = 0; n < kPanel; n += kLine) {
      __builtin_prefetch(w.sums(p) + n);
      __builtin_prefetch(w.scales(p) + n);
      if (to.bias != nullptr && p * kPanel + n < w.n) __builtin_prefetch(to.bias + p * kPanel + n);
    }
  }
}

void FloatSink::tile(const int32_t* raw, int64_t m, int count, int64_t p,
                     const Panel& panel) const {
  EpilogueArgs args;
  epilogue_of(raw, m, count, p, panel, &args);
  kernels.sums->epilogue(&args);
}

bool FloatSink::epilogue_of(const int32_t* raw, int64_t m, int count, int64_t p, const Panel& panel,
                            EpilogueArgs* args) const {
  const int64_t at = ((first + m) * to.row_of(w) + p * kPanel) * to.element();
  const float* scale = row_scale + (first + m) * scale_stride;
  *args = {raw,
           count,
           columns_of(w, p),
           rows.add + m,
           rows.mul + m,
           scale,
           scale_stride,
           &panel,
           to.activation,
           to.dtype,
           to.data + at,
           to.row_of(w),
           columns_of(w, p) == kPanel && past_caches(to, w, rows.tuning),
           to.residual_at(at)};
  return to.residual == nullptr;  // which strips do not add
}

const Format& format_of_codes(const Kernels& kernels, const PackedWeight& w, const int8_t* q,
                              int64_t count) {
  const Format& wide = format_for(kernels, operands_of(w, false), count);
  const Format& narrow = format_for(kernels, operands_of(w, true), count);
  const bool same = &wide == &narrow || !all_narrow(q, count * w.k);
  return same ? wide : narrow;
}

CodeRows::CodeRows(const Kernels& kernels, const PackedWeight& w, const int8_t* q,
                   const int32_t* zero_points, int64_t zero_stride, int64_t count,
                   RowsMemory& memory)
    : CodeRows(format_of_codes(kernels, w, q, count), w, q, nullptr, zero_points, zero_stride,
               count, memory) {}

CodeRows::CodeRows(const Format& format, const PackedWeight& w, const int8_t* q,
                   const int32_t* order, const int32_t* zero_points, int64_t zero_stride,
                   int64_t count, RowsMemory& memory)
    : RowSource(make_rows(format, count, w, memory)),
      w(w),
      q(q),
      zero_points(zero_points),
      zero_stride(zero_stride),
      order(order) {}

void CodeRows::fill(int64_t begin, int64_t end) const {
  for (int64_t m = begin; m < end; ++m) {
    const int64_t from = order == nullptr ? m : order[m];
    arrange_row(w, q + from * w.k, zero_points[m * zero_stride], m, rows);
  }
}

int64_t CodeRows::work() const { return rows.count * w.k * kStepsPerElement; }

FloatRows::FloatRows(const Kernels& kernels, const PackedWeight& w, const FloatMatrix& x,
                     const CodeSpec& spec, const TensorCode* shared, float* scales,
                     RowsMemory& memory)
    : RowSource(
          make_rows(format_for(kernels, operands_of(w, spec.bits < 8), x.rows), x.rows, w, memory)),
      kernels(kernels),
      w(w),
      x(x),
      spec(spec),
      shared(shared),
      scales(scales) {}

void FloatRows::fill(int64_t begin, int64_t end) const {
  thread_local Scratch scratch;
  const bool in_place = rows.format->bytes_per_code == 1;
  int8_t* apart = in_place ? nullptr : scratch.get<int8_t>(kRowsAtOnce * w.k);
  const int64_t stride = in_place ? rows.stride : w.k;
  RowCode codes[kRowsAtOnce];
  for (int64_t m = begin; m < end; m += kRowsAtOnce) {
    const int64_t count = std::min<int64_t>(kRowsAtOnce, end - m);
    int8_t* q = in_place ? reinterpret_cast<int8_t*>(rows.a + m * stride) : apart;
    quantize_rows(kernels, x, spec, shared, m, count, codes, q, stride);
    for (int64_t r = 0; r < count; ++r) {
      arrange_row(w, q + r * stride, codes[r].zero_point, m + r, rows);
      if (shared == nullptr) scales[m + r] = codes[r].scale;
    }
  }
}

int64_t FloatRows::work() const { return rows.count * w.k * kStepsPerElement; }

}  // namespace qfx::cpu
