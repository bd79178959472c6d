// dequantize: one pass over a matrix. (Q5) (E1)
#include "cuda/dequantize.h"
#include "cuda/epilogue.cuh"

namespace qfx::cuda {
namespace {

constexpr int kColumnsAtOnce = 32, kRowsAtOnce = 8;  // of a block's threads, each of which has
constexpr int kQuad = 4;                             // this many columns

template <typename T>
struct alignas(kQuad * sizeof(T)) Four {
  T v[kQuad];
};

// to[0..count) = from[0..count); `whole`: all of them, at an aligned address.
template <typename T>
__device__ __forceinline__ void copy_quad(const T* from, int count, bool whole, T (&to)[kQuad]) {
  if (whole) {
    const Four<T> all = *reinterpret_cast<const Four<T>*>(from);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) to[j] = all.v[j];
    return;
  }
#pragma unroll
  for (int j = 0; j < kQuad; ++j) to[j] = j < count ? from[j] : T{};
}

// q[i..i + 3], as far as there are `count`.
__device__ __forceinline__ void load_sums(const Dequantize& job, int64_t i, int count, bool whole,
                                          int32_t (&sums)[kQuad]) {
  if (!job.codes) return copy_quad(static_cast<const int32_t*>(job.q) + i, count, whole, sums);
  int8_t codes[kQuad];
  copy_quad(static_cast<const int8_t*>(job.q) + i, count, whole, codes);
#pragma unroll
  for (int j = 0; j < kQuad; ++j) sums[j] = codes[j];
}

template <typename T>
__device__ __forceinline__ void store_quad(const T (&from)[kQuad], int count, bool whole, T* to) {
  if (whole) {
    Four<T> all;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) all.v[j] = from[j];
    *reinterpret_cast<Four<T>*>(to) = all;
    return;
  }
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    if (j < count) to[j] = from[j];
  }
}

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(kColumnsAtOnce* kRowsAtOnce)
    dequantize_kernel(Dequantize job, T* y) {
  const int64_t n = (int64_t{blockIdx.x} * kColumnsAtOnce + threadIdx.x) * kQuad;
  const int64_t left = job.columns - n;
  if (left <= 0) return;
  const int count = static_cast<int>(left < kQuad ? left : kQuad);
  const bool whole = job.aligned && count == kQuad;
  const int64_t step = int64_t{gridDim.y} * kRowsAtOnce;
  for (int64_t m = int64_t{blockIdx.y} * kRowsAtOnce + threadIdx.y; m < job.rows; m += step) {
    const float row_scale = job.scale[m * job.step];
    const int32_t zero = job.zero_point == nullptr ? 0 : job.zero_point[m * job.step];
    const float* col_scale =
        job.col_scale == nullptr ? nullptr : job.col_scale + m / job.rows_a_scale * job.columns;
    int32_t sums[kQuad];
    load_sums(job, m * job.columns + n, count, whole, sums);
    T results[kQuad] = {};
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      if (j >= count) break;
      const float scale = col_scale == nullptr ? row_scale : row_scale * col_scale[n + j];
      const bool has_bias = job.bias != nullptr;
      const float bias = has_bias ? load_float(job.bias, job.bias_dtype, n + j) : 0.f;
      results[j] = static_cast<T>(finish<kActivation>(minus(sums[j], zero), scale, has_bias, bias));
    }
    store_quad(results, count, whole, y + m * job.columns + n);
  }
}

}  // namespace

void dequantize(const Dequantize& given, Activation activation, Dtype dtype, void* y,
                Stream stream) {
  if (given.rows == 0 || given.columns == 0) return;
  Dequantize job = given;
  job.aligned = reinterpret_cast<uintptr_t>(job.q) % 16 == 0 && job.columns % kQuad == 0;
  constexpr int64_t kMostBlocks = 65535, kColumns = kColumnsAtOnce * kQuad;
  const int64_t rows = (job.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const dim3 grid(static_cast<unsigned>((job.columns + kColumns - 1) / kColumns),
                  static_cast<unsigned>(rows < kMostBlocks ? rows : kMostBlocks));
  with_activation(activation, [&](auto chosen) {
    with_type(dtype, [&](auto type) {
      using T = decltype(type);
      launch(dequantize_kernel<T, decltype(chosen)::value>, grid, dim3(kColumnsAtOnce, kRowsAtOnce),
             0, stream, job, static_cast<T*>(y));
    });
  });
}

}  // namespace qfx::cuda
