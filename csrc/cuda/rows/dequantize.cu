// dequantize: one pass over a matrix. (Q5) (E1)
#include <type_traits>

#include "cuda/rows/dequantize.h"
#include "cuda/rows/epilogue.cuh"

namespace qfx::cuda {
namespace {

constexpr int kColumnsAtOnce = 32, kRowsAtOnce = 8;  // of a block's threads, each of which has
constexpr int kQuad = 4;                             // this many columns

// Four elements as one word.
template <typename T>
using Word =
    std::conditional_t<sizeof(T) == 4, uint4, std::conditional_t<sizeof(T) == 2, uint2, unsigned>>;

template <typename T>
struct alignas(sizeof(Word<T>)) Quad {
  T v[kQuad] = {};
};

// from[0..count), then zeros; `whole`: all of them, at an aligned address.
template <typename T>
__device__ __forceinline__ Quad<T> load_quad(const T* from, int count, bool whole) {
  Quad<T> quad;
  if (whole) {
    *reinterpret_cast<Word<T>*>(quad.v) = load_once(reinterpret_cast<const Word<T>*>(from));
    return quad;
  }
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    if (j < count) quad.v[j] = from[j];
  }
  return quad;
}

template <typename T>
__device__ __forceinline__ void store_quad(const Quad<T>& quad, int count, bool whole, T* to) {
  if (whole) {
    store_vector(reinterpret_cast<Word<T>*>(to), *reinterpret_cast<const Word<T>*>(quad.v));
    return;
  }
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    if (j < count) to[j] = quad.v[j];
  }
}

// q[i..i + 3], as far as there are `count`.
__device__ __forceinline__ Quad<int32_t> load_sums(const Dequantize& job, int64_t i, int count,
                                                   bool whole) {
  if (!job.codes) return load_quad(static_cast<const int32_t*>(job.q) + i, count, whole);
  const Quad<int8_t> codes = load_quad(static_cast<const int8_t*>(job.q) + i, count, whole);
  Quad<int32_t> sums;
#pragma unroll
  for (int j = 0; j < kQuad; ++j) sums.v[j] = codes.v[j];
  return sums;
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
    const float row_scale = job.scale[m * job.scale_step];
    const int32_t zero = job.zero_point == nullptr ? 0 : job.zero_point[m * job.zero_step];
    const float* col_scale =
        job.col_scale == nullptr ? nullptr : job.col_scale + m / job.rows_a_scale * job.columns;
    const Quad<int32_t> sums = load_sums(job, m * job.columns + n, count, whole);
    Quad<T> results;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const int64_t column = n + (j < count ? j : 0);  // one that is there
      const float scale = col_scale == nullptr ? row_scale : row_scale * col_scale[column];
      const bool has_bias = job.bias != nullptr;
      const float bias = has_bias ? load_float(job.bias, job.bias_dtype, column) : 0.f;
      results.v[j] =
          static_cast<T>(finish<kActivation>(minus(sums.v[j], zero), scale, has_bias, bias));
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
