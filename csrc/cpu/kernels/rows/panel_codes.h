// A few rows of floats, 32 or fewer, -> symmetric codes: less a center, rotated (R1), each with its
// own scale, (Q1), (Q3) and (Q4); and back, rows of floats rotated back and stored. The scales of
// all rows are made together, and rows ahead are fetched: heads lie side by side in memory, so the
// rows of one lie apart.
#pragma once

#include "cpu/kernels/rows/quantize.h"
#include "cpu/kernels/rows/rotate.h"
#include "cpu/kernels/rows/widen.h"
#include "cpu/kernels/tables/attention.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

inline int64_t in_panels(int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }

// Row r in float32, which is `row`, zero padded to whole panels, unless it lies ready.
inline const float* read_row(const PanelCodesArgs& args, int64_t r, float* row) {
  constexpr int64_t kLine = 64, kRowsAhead = 8;
  const int64_t n = args.columns, element = args.dtype == Dtype::kFloat32 ? 4 : 2;
  const char* from = static_cast<const char*>(args.x) + r * args.stride;
  for (int64_t i = 0; i < n * element; i += kLine) {
    __builtin_prefetch(from + kRowsAhead * args.stride + i);
  }
  if (args.dtype == Dtype::kFloat32 && n % kPanel == 0) return reinterpret_cast<const float*>(from);
  for (int64_t i = n; i < in_panels(n); ++i) row[i] = 0.f;
  if (args.dtype != Dtype::kFloat32) widen_row(from, args.dtype, n, row);
  if (args.dtype == Dtype::kFloat32) __builtin_memcpy(row, from, n * sizeof(float));
  return row;
}

#if defined(__AVX2__) && defined(__FMA__)
namespace wide {

// out = R (x - center), kBlock elements at a time, or x - center; how large its elements are.
template <int kBlock, bool kRotate>
inline Integers turned(const float* x, int64_t n, const float* center, float* out) {
  constexpr int kVectors = kBlock / kLanes;
  Integers most = no_magnitude();
  for (int64_t k = 0; k < n; k += kBlock) {
    Vector v[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) v[i] = load(x + k + i * kLanes);
    if (center != nullptr) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) v[i] = subtract(v[i], load(center + k + i * kLanes));
    }
    if constexpr (kRotate) stages<kBlock, false>(v);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kRotate) v[i] = multiply(v[i], all(kInverseRoot<kBlock>));
      most = larger_magnitude(most, v[i]);
      store(out + k + i * kLanes, v[i]);
    }
  }
  return most;
}

// All rows, so that what the stages need is loaded once.
template <int kBlock, bool kRotate>
inline void prepare_rows_in(const PanelCodesArgs args, int32_t* magnitude) {
  const int64_t step = in_panels(args.columns), n = kRotate ? args.columns : step;
  for (int64_t r = 0; r < args.rows; r += 4) {
    Integers most[4] = {no_magnitude(), no_magnitude(), no_magnitude(), no_magnitude()};
    for (int i = 0; i < 4 && r + i < args.rows; ++i) {
      float* row = args.floats + (r + i) * step;
      most[i] = turned<kBlock, kRotate>(read_row(args, r + i, row), n, args.center, row);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(magnitude + r), greatest_of_four(most));
  }
}

inline void prepare_rows(const PanelCodesArgs& args, int32_t* magnitude) {
  if (args.rotation == 64) return prepare_rows_in<64, true>(args, magnitude);
  if (args.rotation == 16) return prepare_rows_in<16, true>(args, magnitude);
  prepare_rows_in<kPanel, false>(args, magnitude);
}

}  // namespace wide

using wide::prepare_rows;
#else
inline void prepare_rows(const PanelCodesArgs& args, int32_t* magnitude) {
  const int64_t n = args.columns;
  const Transform transform = {nullptr, args.rotation};
  for (int64_t r = 0; r < args.rows; ++r) {
    float* row = args.floats + r * in_panels(n);
    const float* x = read_row(args, r, row);
    for (int64_t i = 0; i < in_panels(n); ++i) {
      row[i] = args.center == nullptr ? x[i] : x[i] - args.center[i];
    }
    magnitude[r] = rotate_any<false>(row, n, transform, row).magnitude;
  }
}
#endif

// Codes of a finite row plus `offset`; |x * inverse| is at most 127 and a few roundings.
inline void put_codes(const float* x, int64_t n, float inverse, uint8_t offset, int8_t* out) {
#if defined(__AVX512BW__)
  const __m512i added = _mm512_set1_epi8(static_cast<char>(offset));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512 scale = _mm512_set1_ps(inverse);
  const auto words = [&](const float* from) {
    return _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from), scale)),
                              _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from + 16), scale)));
  };
  int64_t i = 0;
  for (; i + 2 * kPanel <= n; i += 2 * kPanel) {
    // The packing instructions work in lanes of 16 bytes.
    const __m512i bytes = _mm512_packs_epi16(words(x + i), words(x + i + kPanel));
    const __m512i codes = _mm512_add_epi8(_mm512_permutexvar_epi32(order, bytes), added);
    _mm512_storeu_si512(out + i, codes);
  }
  if (i < n) {
    const __m512i bytes = _mm512_packs_epi16(words(x + i), _mm512_setzero_si512());
    const __m512i codes = _mm512_add_epi8(_mm512_permutexvar_epi32(order, bytes), added);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_castsi512_si256(codes));
  }
#else
  const RowCode code = {0.f, inverse, 0, -127, 127, true};
  for (int64_t i = 0; i < n; i += kPanel) {
    quantize_block<false>(x + i, code, out + i);
    for (int j = 0; j < kPanel; ++j) out[i + j] = static_cast<int8_t>(out[i + j] + offset);
  }
#endif
}

inline void codes_of_panel(const PanelCodesArgs* args) {
  constexpr int32_t kBeyondFinite = 0x7f800000;
  alignas(64) int32_t magnitude[kPanel] = {};
  alignas(64) float scale[kPanel], inverse[kPanel];
  prepare_rows(*args, magnitude);
  for (int r = 0; r < kPanel; ++r) {  // as code_of
    const float exact = __builtin_bit_cast(float, magnitude[r]) / 127.f;
    scale[r] = exact < 0x1p-126f ? 0x1p-126f : exact;
    inverse[r] = 1.f / scale[r];
  }
  const int64_t n = in_panels(args->columns);
  for (int64_t r = 0; r < args->rows; ++r) {
    int8_t* codes = args->codes + r * args->code_stride;
    const bool finite = magnitude[r] < kBeyondFinite;
    args->scale[r] = finite ? scale[r] : __builtin_bit_cast(float, magnitude[r]);
    if (finite) {
      put_codes(args->floats + r * n, n, inverse[r], args->offset, codes);
    } else {
      __builtin_memset(codes, args->offset, n);
    }
    for (int64_t i = n; i < args->padded; i += kPanel) __builtin_memset(codes + i, 0, kPanel);
  }
}

// Rows of attention's outputs, rotated back, in the output type. (A6)
inline void finish_rows(const FinishArgs* args) {
  const int64_t n = args->columns, element = args->dtype == Dtype::kFloat32 ? 4 : 2;
  const Transform transform = {nullptr, args->rotation};
  for (int64_t r = 0; r < args->rows; ++r) {
    float* y = args->y + r * args->stride;
    char* out = static_cast<char*>(args->out) + r * n * element;
    if (args->rotation != 0 && args->dtype == Dtype::kFloat32) {
      rotate_row_back(y, n, &transform, reinterpret_cast<float*>(out));
      continue;
    }
    if (args->rotation != 0) rotate_row_back(y, n, &transform, y);
    for (int64_t first = 0; first < n; first += kPanel) {
      const int columns = n - first < kPanel ? static_cast<int>(n - first) : kPanel;
      store_row(y + first, columns, args->dtype, out + first * element);
    }
  }
}

}  // namespace
}  // namespace qfx::cpu
