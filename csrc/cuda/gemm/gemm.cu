// multiply_codes of gemm.h, and what follows a product that gives codes.
#include "cuda/gemm/gemm.cuh"

namespace qfx::cuda {
namespace {

constexpr int kSettleThreads = 256;

// One block for each row.
__global__ void __launch_bounds__(kSettleThreads)
    settle_row(CodesOut codes, int64_t n, int8_t* q, float* scale, int32_t* zero_point) {
  const int64_t row = blockIdx.x;
  const int32_t fault = codes.faults[row];
  const RowCode code =
      fault == 0 ? code_at(codes, row) : code_with(codes.spec, __int_as_float(fault), 0);
  if (threadIdx.x == 0) {
    scale[row] = code.scale;
    zero_point[row] = code.zero_point;
  }
  if (code.finite) return;
  for (int64_t i = threadIdx.x; i < n; i += kSettleThreads) q[row * n + i] = 0;
}

}  // namespace

int64_t part_values(const Sizes& size, const GemmPlan& plan) {
  const TileSize tile = size_of(plan.shape);
  return plan.splits == 1 ? 0 : tiles_of(size, plan.shape) * plan.splits * tile.m * tile.n;
}

void multiply_codes(const Sizes& size, const Rows& a, const Rows& w, const CodeTerms& terms,
                    const Output& out, const GemmPlan& plan, int32_t* parts, Stream stream) {
  run_plan(Product{size, a, w, {}, 0, 0, parts}, plan, CodeSums{terms}, out, stream);
}

void settle_codes(const CodesOut& codes, int64_t rows, int64_t n, int8_t* q, float* scale,
                  int32_t* zero_point, Stream stream) {
  if (rows == 0) return;
  launch(settle_row, dim3(static_cast<unsigned>(rows)), dim3(kSettleThreads), 0, stream, codes, n,
         q, scale, zero_point);
}

}  // namespace qfx::cuda
