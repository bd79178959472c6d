#include "cpu/gemm/quantize.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <mutex>
#include <new>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/kernels/tables/code.h"

namespace qfx::cpu {
namespace {

Range widest(const Range& a, const Range& b) {
  return {std::max(a.magnitude, b.magnitude), std::min(a.low, b.low), std::max(a.high, b.high)};
}

constexpr int64_t kStepsPerElement = 8;  // in parallel.h's unit

bool is_none(const Transform& t) { return t.factor == nullptr && t.rotation == 0; }

// Row m in float32: x itself, or `memory`.
const float* row_into(const Kernels& kernels, const FloatMatrix& x, int64_t m, Range* range,
                      float* memory) {
  const float* row = static_cast<const float*>(x.row(m));
  if (x.dtype != Dtype::kFloat32) {
    kernels.row->widen(x.row(m), x.dtype, x.columns, memory);
    row = memory;
  }
  if (is_none(x.transform)) {
    if (range != nullptr) kernels.row->range(row, x.columns, range);
    return row;
  }
  Range found;
  kernels.row->rotate(row, x.columns, &x.transform, memory, range == nullptr ? &found : range);
  return memory;
}

bool needs_memory(const FloatMatrix& x) {
  return x.dtype != Dtype::kFloat32 || !is_none(x.transform);
}

}  // namespace

const float* padded_floats(const Kernels& kernels, const FloatMatrix& x, int64_t stride) {
  thread_local Scratch scratch;
  float* out = scratch.get<float>(x.rows * stride);
  parallel(x.rows, kStepsPerElement * x.rows * stride, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const float* row = row_as_floats(kernels, x, m);
      std::copy(row, row + x.columns, out + m * stride);
      std::fill(out + m * stride + x.columns, out + (m + 1) * stride, 0.f);
    }
  });
  return out;
}

RowCode code_of(const Range& range, const CodeSpec& spec) { return code_of_range(range, spec); }

const float* row_as_floats(const Kernels& kernels, const FloatMatrix& x, int64_t m, Range* range) {
  thread_local Scratch scratch;
  return row_into(kernels, x, m, range, needs_memory(x) ? scratch.get<float>(x.columns) : nullptr);
}

RowCode choose_row_code(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                        int64_t m) {
  Range range;
  row_as_floats(kernels, x, m, &range);
  return code_of(range, spec);
}

void quantize_rows(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                   const TensorCode* shared, int64_t first, int64_t count, RowCode* codes,
                   int8_t* q, int64_t stride) {
  thread_local Scratch scratch;
  float* memory = needs_memory(x) ? scratch.get<float>(kRowsAtOnce * x.columns) : nullptr;
  const int64_t step = memory == nullptr ? 0 : x.columns;
  const float* rows[kRowsAtOnce];
  for (int64_t r = 0; r < count; ++r) {
    Range range;
    Range* asked = shared == nullptr ? &range : nullptr;
    rows[r] = row_into(kernels, x, first + r, asked, memory + r * step);
    if (shared != nullptr) {
      codes[r] = shared->of(first + r);
      continue;
    }
    ::new (&codes[r]) RowCode(code_of(range, spec));  // a copy would wait for the stores
  }
  for (int64_t r = 0; r < count; ++r) {
    kernels.row->quantize(rows[r], x.columns, &codes[r], q + r * stride);
  }
}

void quantize_row_in_groups(const Kernels& kernels, const FloatMatrix& x, int64_t m,
                            const CodeSpec& spec, int64_t group, const GroupCodes& to) {
  kernels.row->quantize_groups(row_as_floats(kernels, x, m), x.columns, group, &spec, &to);
}

RowCode TensorCode::of(int64_t m) const {
  return std::isfinite(scales[m]) ? code : faulty_code(scales[m], code.qmin, code.qmax);
}

TensorCode choose_tensor_code(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                              float* scales) {
  Range all = {0, 0, 0};
  std::mutex merging;
  parallel(x.rows, x.rows * x.columns * kStepsPerElement, [&](int64_t begin, int64_t end) {
    Range part = {0, 0, 0};
    for (int64_t m = begin; m < end; ++m) {
      Range range;
      row_as_floats(kernels, x, m, &range);
      const bool finite = range.magnitude < kInfiniteBits;
      if (finite) part = widest(part, range);
      scales[m] = finite ? 0.f : std::bit_cast<float>(range.magnitude);
    }
    const std::lock_guard<std::mutex> lock(merging);
    all = widest(all, part);
  });
  const RowCode code = code_of(all, spec);
  for (int64_t m = 0; m < x.rows; ++m) {
    if (scales[m] == 0.f) scales[m] = code.scale;
  }
  return {code, scales};
}

RowCode given_code(const CodeSpec& spec, float scale, int32_t zero_point) {
  const int32_t qmax = (1 << (spec.bits - 1)) - 1;
  const int32_t qmin = spec.symmetric ? -qmax : -qmax - 1;
  if (!std::isfinite(scale)) return faulty_code(scale, qmin, qmax);
  const float kept = std::max(scale, kSmallestScale);
  return {kept, 1.f / kept, std::clamp(zero_point, qmin, qmax), qmin, qmax, true};
}

RowCode given_row_code(const Range& range, const CodeSpec& spec, float scale, int32_t zero_point) {
  if (range.magnitude < kInfiniteBits) return given_code(spec, scale, zero_point);
  return code_of(range, spec);  // (Q4)
}

void quantize_row_of(const Kernels& kernels, const FloatMatrix& x, int64_t m, const RowCode& code,
                     int8_t* q) {
  kernels.row->quantize(row_as_floats(kernels, x, m), x.columns, &code, q);
}

namespace {

constexpr int64_t kStepsToQuantize = 16;  // an element, in parallel.h's unit

void quantize_by_row(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                     const MatrixCodes& to) {
  const int64_t k = x.columns;
  TensorCode shared{};
  if (spec.per_tensor) shared = choose_tensor_code(kernels, x, spec, to.scale);
  parallel(x.rows, x.rows * k * kStepsToQuantize, [&](int64_t begin, int64_t end) {
    RowCode codes[kRowsAtOnce];
    for (int64_t m = begin; m < end; m += kRowsAtOnce) {
      const int64_t count = std::min<int64_t>(kRowsAtOnce, end - m);
      quantize_rows(kernels, x, spec, spec.per_tensor ? &shared : nullptr, m, count, codes,
                    to.q + m * k, k);
      for (int64_t r = 0; r < count; ++r) {
        to.scale[m + r] = codes[r].scale;
        to.zero[m + r] = codes[r].zero_point;
      }
    }
  });
}

}  // namespace

void quantize_matrix(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                     int64_t group, const MatrixCodes& to) {
  if (group == 0) return quantize_by_row(kernels, x, spec, to);
  const int64_t k = x.columns, groups = (k + group - 1) / group;
  parallel(x.rows, x.rows * k * kStepsToQuantize, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const GroupCodes row = {to.q + m * k, to.scale + m * groups, to.zero + m * groups};
      quantize_row_in_groups(kernels, x, m, spec, group, row);
    }
  });
}

}  // namespace qfx::cpu
