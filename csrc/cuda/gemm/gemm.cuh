// The kernels of gemm.h. See tiles.cuh for the operands and plan.h for how the work is cut.
#pragma once

#include "cuda/gemm/finish.cuh"

namespace qfx::cuda {

__device__ __forceinline__ TileRows rows_from(const Rows& rows, int64_t batch, int64_t first,
                                              int64_t end) {
  const int8_t* data = rows.data + batch * rows.batch_step + first * rows.pitch;
  return {data, rows.pitch, static_cast<int>(end - first < 128 ? end - first : 128)};
}

struct Product {
  Sizes size;
  Rows a, w;
  TileGrid grid;
  int steps, step_count;  // of K, and those that a block takes
  int32_t* parts;         // [splits][tiles][tile], as staged; null unless K is split
};

// One block: the sums of one tile over one part of K, finished unless there are other parts.
template <class T, class Sums>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    gemm(Product p, Sums sums, Output out) {
  uint8_t* shared = dynamic_shared<uint8_t>();
  const TilePlace place = TilePlace::of<T>(p.grid, blockIdx.x);
  const int first = static_cast<int>(blockIdx.y) * p.step_count;
  const int end = first + p.step_count < p.steps ? first + p.step_count : p.steps;
  typename T::Sums raw = {};
  multiply_tile<T>(shared, rows_from(p.a, place.batch, place.m, p.size.m),
                   rows_from(p.w, place.batch, place.n, p.size.n), p.size.k_bytes, first, end, raw,
                   typename Sums::Multiply{}, [](int) {});
  int32_t* staged = reinterpret_cast<int32_t*>(shared);
  stage_tile<T>(staged, raw);
  if (p.parts == nullptr) return finish_tile<T>(staged, place, p.size, sums, out);
  const int64_t tile = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  auto* part = reinterpret_cast<int4*>(p.parts + tile * T::kElements);
  for (int i = threadIdx.x; i < T::kElements / 4; i += T::kThreads) {
    part[i] = reinterpret_cast<const int4*>(staged)[i];
  }
}

// One block: adds up the parts of one tile.
template <class T, class Sums>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    add_parts(Product p, int splits, Sums sums, Output out) {
  uint8_t* shared = dynamic_shared<uint8_t>();
  for (int i = threadIdx.x; i < T::kElements / 4; i += T::kThreads) {
    int4 sum = make_int4(0, 0, 0, 0);
    for (int s = 0; s < splits; ++s) {
      const int64_t tile = static_cast<int64_t>(s) * gridDim.x + blockIdx.x;
      const int4 part = reinterpret_cast<const int4*>(p.parts + tile * T::kElements)[i];
      sum = make_int4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
    reinterpret_cast<int4*>(shared)[i] = sum;
  }
  __syncthreads();
  const TilePlace place = TilePlace::of<T>(p.grid, blockIdx.x);
  finish_tile<T>(reinterpret_cast<const int32_t*>(shared), place, p.size, sums, out);
}

template <class T, class Sums>
void run_tiles(Product p, const GemmPlan& plan, const Sums& sums, const Output& out,
               Stream stream) {
  const unsigned tiles = static_cast<unsigned>(tiles_of(p.size, T::kShape));
  const unsigned splits = static_cast<unsigned>(plan.splits);
  p.grid = grid_of(p.size, T::kShape);
  p.steps = static_cast<int>(steps_of(p.size));
  p.step_count = plan.step_count;
  launch(gemm<T, Sums>, dim3(tiles, splits), dim3(T::kThreads), T::kSharedBytes, stream, p, sums,
         out);
  if constexpr (T::kShape != Large::kShape) {  // which fill the GPU, so they are not split
    if (p.parts == nullptr) return;
    launch(add_parts<T, Sums>, dim3(tiles), dim3(T::kThreads), 4 * T::kElements, stream, p,
           plan.splits, sums, out);
  }
}

template <class Sums>
void run_plan(const Product& p, const GemmPlan& plan, const Sums& sums, const Output& out,
              Stream stream) {
  if (plan.shape == TileShape::k16x64) return run_tiles<Small>(p, plan, sums, out, stream);
  if (plan.shape == TileShape::k64x64) return run_tiles<Medium>(p, plan, sums, out, stream);
  run_tiles<Large>(p, plan, sums, out, stream);
}

}  // namespace qfx::cuda
