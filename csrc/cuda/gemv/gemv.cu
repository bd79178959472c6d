// weight_linear of gemv.h: which kernel, and how K is shared.
#include "cuda/gemv/gemv.cuh"

namespace qfx::cuda {
namespace {

// More warps share K until the GPU has two blocks for each multiprocessor, or a lane one load.
int parts_of(const WeightOnly& p, int multiprocessors) {
  int parts = 1;
  const auto blocks = [&] { return ceil_div(p.n * parts, kGemvWarps * kGemvColumns); };
  while (parts < kGemvWarps && blocks() < 2 * multiprocessors && p.k > parts * 512) parts *= 2;
  return parts;
}

template <typename X, int kRows>
void run(const WeightOnly& p, const GemvPlan& plan, Stream stream) {
  const int64_t columns = kGemvWarps / plan.parts * kGemvColumns;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.n, columns)),
                  static_cast<unsigned>(ceil_div(p.rows, kRows)));
  launch(weight_only<X, kRows>, grid, dim3(kGemvThreads), 0, stream, p, plan);
}

template <typename X>
void run_rows(const WeightOnly& p, GemvPlan plan, Stream stream) {
  constexpr uintptr_t kVector = 4 * sizeof(X);
  plan.vectors = p.k % 4 == 0 && reinterpret_cast<uintptr_t>(p.x) % kVector == 0;
  if (p.rows == 1) return run<X, 1>(p, plan, stream);
  if (p.rows <= 4) return run<X, 4>(p, plan, stream);
  run<X, 8>(p, plan, stream);
}

}  // namespace

void weight_linear(const WeightOnly& p, int multiprocessors, Stream stream) {
  const GemvPlan plan = {parts_of(p, multiprocessors), false};
  with_type(p.x_dtype, [&](auto zero) { run_rows<decltype(zero)>(p, plan, stream); });
}

}  // namespace qfx::cuda
