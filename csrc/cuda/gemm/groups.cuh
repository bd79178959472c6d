// Products of groups of K, which have a scale of the weight each, and perhaps a zero point, added
// up as floats, group after group. Equation (E3).
#pragma once

#include "cuda/gemm/gemm.cuh"

namespace qfx::cuda {

struct Groups : GroupTerms {
  int steps;  // of K in a group
};

// totals = fma(fl(raw - zero_m colsum_gn - d_gm zw_gn), fl(scale_m * scale_gn), totals), raw = 0.
template <class T>
__device__ __forceinline__ void add_group(const Groups& w, const TilePlace& place,
                                          const Sizes& size, const PerRow<float>& row_scale, int g,
                                          typename T::Sums& raw,
                                          float (&totals)[T::kBlocksM][T::kBlocksN][4]) {
  using F = Fragment<T>;
  uint32_t zero[T::kBlocksM][2], d[T::kBlocksM][2];
  float scale_m[T::kBlocksM][2];
#pragma unroll
  for (int i = 0; i < T::kBlocksM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t m = place.m + F::row_of(i, h);
      const bool there = m < size.m;
      zero[i][h] = there ? static_cast<uint32_t>(at(w.zero, m)) : 0;
      const bool has_sum = there && w.w_zero.data != nullptr;
      scale_m[i][h] = there ? at(row_scale, m) : 0.f;
      d[i][h] = has_sum ? static_cast<uint32_t>(w.row_sums[g * size.m + m]) : 0;
    }
  }
#pragma unroll
  for (int j = 0; j < T::kBlocksN; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int64_t n = place.n + F::column_of(j) + e;
      const bool there = n < size.n, has_zero = there && w.w_zero.data != nullptr;
      const uint32_t colsum = there ? static_cast<uint32_t>(at(w.colsum, n, g)) : 0;
      const uint32_t w_zero = has_zero ? static_cast<uint32_t>(at(w.w_zero, n, g)) : 0;
      const float scale = there ? at(w.scale, n, g) : 0.f;
#pragma unroll
      for (int i = 0; i < T::kBlocksM; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t sum = static_cast<uint32_t>(raw[i][j][2 * h + e]);
          const uint32_t exact = sum - zero[i][h] * colsum - d[i][h] * w_zero;
          float& total = totals[i][j][2 * h + e];
          total =
              fmaf(static_cast<float>(static_cast<int32_t>(exact)), scale_m[i][h] * scale, total);
          raw[i][j][2 * h + e] = 0;
        }
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    gemm_groups(Product p, Groups w, Output out) {
  uint8_t* shared = dynamic_shared<uint8_t>();
  const TilePlace place = TilePlace::of<T>(p.grid, blockIdx.x);
  typename T::Sums raw = {};
  float totals[T::kBlocksM][T::kBlocksN][4] = {};
  multiply_tile<T>(shared, rows_from(p.a, place.batch, place.m, p.size.m),
                   rows_from(p.w, place.batch, place.n, p.size.n), p.size.k_bytes, 0, p.steps, raw,
                   MultiplyCodes{}, [&](int step) {
                     if ((step + 1) % w.steps != 0 && step + 1 != p.steps) return;
                     add_group<T>(w, place, p.size, out.row_scale, step / w.steps, raw, totals);
                   });
  float* staged = reinterpret_cast<float*>(shared);
  stage_tile<T>(staged, totals);
  finish_tile<T>(staged, place, p.size, GroupSums{}, out);
}

}  // namespace qfx::cuda
