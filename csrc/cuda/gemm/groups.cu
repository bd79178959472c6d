// multiply_groups and sum_groups_of_rows of gemm.h.
#include "cuda/core/warp.cuh"
#include "cuda/gemm/groups.cuh"

namespace qfx::cuda {
namespace {

constexpr int kSumThreads = 128;

// A warp for each row and group.
__global__ void __launch_bounds__(kSumThreads)
    sum_group(Rows q, PerRow<int32_t> zero, int64_t rows, int64_t k, int64_t group, int64_t groups,
              int32_t* sums) {
  const int64_t warp = (int64_t{blockIdx.x} * kSumThreads + threadIdx.x) / 32;
  if (warp >= rows * groups) return;
  const int64_t m = warp / groups, g = warp % groups, first = g * group;
  const int64_t end = first + group < k ? first + group : k;
  int32_t sum = 0;
  for (int64_t i = first + threadIdx.x % 32; i < end; i += 32) sum += q.data[m * q.pitch + i];
  sum = sum_of_warp(sum);
  const int32_t zeros = static_cast<int32_t>(end - first) * at(zero, m);
  if (threadIdx.x % 32 == 0) sums[g * rows + m] = sum - zeros;
}

template <class T>
void run_groups(Product p, const Groups& groups, const Output& out, Stream stream) {
  p.grid = grid_of(p.size, T::kShape);
  launch(gemm_groups<T>, dim3(static_cast<unsigned>(tiles_of(p.size, T::kShape))),
         dim3(T::kThreads), T::kSharedBytes, stream, p, groups, out);
}

}  // namespace

void multiply_groups(const Sizes& size, const Rows& a, const Rows& w, const GroupTerms& terms,
                     const Output& out, TileShape shape, Stream stream) {
  const Product product = {size, a, w, {}, static_cast<int>(steps_of(size)), 0, nullptr};
  const Groups groups = {terms, static_cast<int>(ceil_div(terms.group, kStepBytes))};
  if (shape == TileShape::k16x64) return run_groups<Small>(product, groups, out, stream);
  run_groups<Medium>(product, groups, out, stream);
}

void sum_groups_of_rows(const Rows& q, const PerRow<int32_t>& zero, int64_t rows, int64_t k,
                        int64_t group, int32_t* sums, Stream stream) {
  const int64_t groups = ceil_div(k, group), warps = rows * groups;
  const unsigned blocks = static_cast<unsigned>(ceil_div(warps * 32, kSumThreads));
  launch(sum_group, dim3(blocks), dim3(kSumThreads), 0, stream, q, zero, rows, k, group, groups,
         sums);
}

}  // namespace qfx::cuda
