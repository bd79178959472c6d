// How a row becomes codes: (Q1) to (Q4), (Q6).
#pragma once

#include "cuda/rows/skeleton.cuh"

namespace qfx::cuda {

struct RowCode {
  float scale, inverse;
  int32_t zero_point, qmin, qmax;
  bool finite;
};

constexpr float kSmallestScale = 0x1p-126f;
constexpr int32_t kInfinity = 0x7f800000;

__device__ __forceinline__ RowCode code_with(const CodeSpec& spec, float scale,
                                             int32_t zero_point) {
  const int32_t qmax = (1 << (spec.bits - 1)) - 1;
  const int32_t qmin = spec.symmetric ? -qmax : -qmax - 1;
  if (!(fabsf(scale) < __int_as_float(kInfinity)))
    return {scale, 0.f, 0, qmin, qmax, false};  // (Q4)
  const float kept = fmaxf(scale, kSmallestScale);
  return {kept, 1.f / kept, min(max(zero_point, qmin), qmax), qmin, qmax, true};
}

// Bit pattern of the greatest magnitude, NaN above infinity above all finite.
__device__ __forceinline__ int32_t magnitude_of(const Extremes& e) {
  const int32_t negative = static_cast<int32_t>(e.least);
  return max(e.most, negative < 0 ? negative & 0x7fffffff : 0);
}

__device__ __forceinline__ RowCode code_of(const Extremes& e, const CodeSpec& spec) {
  const int32_t magnitude = magnitude_of(e);
  if (magnitude >= kInfinity) return code_with(spec, __int_as_float(magnitude), 0);
  const int32_t qmax = (1 << (spec.bits - 1)) - 1;
  if (spec.symmetric) {  // (Q1)
    return code_with(spec, __int_as_float(magnitude) / static_cast<float>(qmax), 0);
  }
  const int32_t qmin = -qmax - 1;
  const float low = static_cast<int32_t>(e.least) < 0 ? __uint_as_float(e.least) : 0.f;
  const float high = __int_as_float(e.most), n = static_cast<float>(qmax - qmin);
  const float scale = fmaxf(high / n - low / n, kSmallestScale);  // (Q2)
  return code_with(spec, scale, qmin - __float2int_rn(low * (1.f / scale)));
}

__device__ __forceinline__ int32_t clamp_code(const RowCode& code, int32_t q) {
  return min(max(q, code.qmin), code.qmax);
}

// (Q3), and (Q6), whose clamp changes nothing in (Q3).
__device__ __forceinline__ int32_t code_for(const RowCode& code, float x) {
  const float scaled = fminf(fmaxf(x * code.inverse, -1024.f), 1024.f);
  return code.finite ? clamp_code(code, __float2int_rn(scaled) + code.zero_point) : 0;
}

// q[0..count) of a piece; `aligned`: 8 bytes at once.
__device__ __forceinline__ void store_codes(int8_t* q, int count, bool aligned,
                                            const int32_t (&codes)[kPiece]) {
  if (aligned && count == kPiece) {
    uint2 bytes;
    int8_t* each = reinterpret_cast<int8_t*>(&bytes);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) each[i] = static_cast<int8_t>(codes[i]);
    *reinterpret_cast<uint2*>(q) = bytes;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    if (i < count) q[i] = static_cast<int8_t>(codes[i]);
  }
}

// Writes the codes of a row: code_at(k + i, v) of each element.
template <typename Row, typename CodeAt>
__device__ __forceinline__ void write_codes(Row& row, int8_t* q, const CodeAt& code_at) {
  int8_t* to = q + row.m * row.x.columns;
  const bool aligned = (reinterpret_cast<uintptr_t>(q) | row.x.columns) % kPiece == 0;
  row.each([&](int64_t k, int count, const float (&v)[kPiece]) {
    int32_t codes[kPiece];
    code_at(k, v, codes);
    store_codes(to + k, count, aligned, codes);
  });
}

template <typename Row>
__device__ __forceinline__ void write_code(const Row& row, const Codes& out, const RowCode& code) {
  if (static_cast<int>(threadIdx.x) % (Row::kStep / kPiece) != 0) return;  // one thread of a team
  out.scale[row.m] = code.scale;
  out.zero_point[row.m] = code.zero_point;
}

// The code of a row: as it chooses, or in a per-tensor scheme the shared one, unless it is faulty.
template <typename Row>
__device__ __forceinline__ RowCode code_of_row(Row& row, const CodeSpec& spec,
                                               const TensorCode& shared) {
  const Extremes found = row.extremes();
  if (!spec.per_tensor || magnitude_of(found) >= kInfinity) return code_of(found, spec);
  return code_with(spec, *shared.scale, *shared.zero_point);
}

// The same, written to where the row's belong.
template <typename Row>
__device__ __forceinline__ RowCode code_of_row(Row& row, const CodeSpec& spec, const Codes& out) {
  const RowCode code = code_of_row(row, spec, out.shared);
  write_code(row, out, code);
  return code;
}

}  // namespace qfx::cuda
