// lowbit_linear of lowbit.h: which kernel, and how wide its blocks are.
#include <type_traits>

#include "cuda/gemv/lowbit.cuh"
#include "cuda/gemv/lowbit_mma.cuh"

namespace qfx::cuda {
namespace {

// --- on tensor cores ---

// Each multiprocessor has room for 16 warps: blocks are narrower where there are more of them, so
// that all run at once.
unsigned warps_of(int64_t blocks, int multiprocessors) {
  unsigned warps = kMmaWarps;
  while (warps > 4 && blocks * warps > int64_t{multiprocessors} * kMmaWarps) warps /= 2;
  return warps;
}

template <typename X, int kBits, int kTiles>
void run_mma(const LowbitOnly& p, bool vectors, int multiprocessors, Stream stream) {
  const int64_t blocks = p.w.panels() * ceil_div(p.rows, 8 * kTiles);
  launch(lowbit_mma<X, kBits, kTiles>, dim3(static_cast<unsigned>(blocks)),
         dim3(32 * warps_of(blocks, multiprocessors)), 0, stream, p, vectors);
}

// --- without them ---

// Blocks have whole panels, or parts of them until the GPU has two blocks for each multiprocessor.
int lanes_of(const LowbitOnly& p, int multiprocessors) {
  int lanes = kQuads;
  while (lanes > 2 && p.w.panels() * (kQuads / lanes) < 2 * multiprocessors) lanes /= 2;
  return lanes;
}

template <int kBits, int kRows>
void run(const LowbitOnly& p, const LowbitPlan& plan, Stream stream) {
  const int64_t blocks = p.w.panels() * (kQuads / plan.lanes) * ceil_div(p.rows, kRows);
  launch(lowbit_only<kBits, kRows>, dim3(static_cast<unsigned>(blocks)), dim3(kLowbitThreads), 0,
         stream, p, plan);
}

// --- either ---

template <typename X, int kBits>
void run_rows(const LowbitOnly& p, int multiprocessors, Stream stream) {
  const bool vectors = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.k % kOctet == 0;
  if constexpr (std::is_same_v<X, float>) {
    const LowbitPlan plan = {lanes_of(p, multiprocessors), vectors};
    if (p.rows == 1) return run<kBits, 1>(p, plan, stream);
    if (p.rows <= 4) return run<kBits, 4>(p, plan, stream);
    run<kBits, 8>(p, plan, stream);
  } else {
    if (p.rows <= 8) return run_mma<X, kBits, 1>(p, vectors, multiprocessors, stream);
    run_mma<X, kBits, 2>(p, vectors, multiprocessors, stream);
  }
}

}  // namespace

bool has_lowbit_kernel(Dtype x, int64_t rows, int capability) {
  constexpr int kHasFloatProducts = 80;  // of bfloat16, and of float16 for 16 k
  return rows <= kFewLowbitRows && (x == Dtype::kFloat32 || capability >= kHasFloatProducts);
}

void lowbit_linear(const LowbitOnly& p, int multiprocessors, Stream stream) {
  with_type(p.x_dtype, [&](auto zero) {
    using X = decltype(zero);
    if (p.w.bits == 4) return run_rows<X, 4>(p, multiprocessors, stream);
    run_rows<X, 5>(p, multiprocessors, stream);
  });
}

}  // namespace qfx::cuda
