// Signs of rows as bits: signs.h.
#include <type_traits>

#include "cuda/core/types.cuh"
#include "cuda/rows/signs.h"

namespace qfx::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// A block takes one row, a warp of it 32 words at a time, of which each lane stores one.
template <typename X>
__global__ void __launch_bounds__(kThreads) signs_of_row(const X* x, int64_t k, Signs out) {
  using Real = std::conditional_t<std::is_same_v<X, double>, double, float>;
  struct Found {
    int32_t set[kWarps];
    uint32_t nan[kWarps];
  };
  Found& found = static_shared<Found>();
  const int64_t row = blockIdx.x;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int32_t set = 0;
  uint32_t nan = 0;
  for (int64_t first = warp * 32; first < out.words; first += kThreads) {
    uint32_t mine = 0;
    const int count = static_cast<int>(out.words - first < 32 ? out.words - first : 32);
    for (int w = 0; w < count; ++w) {
      const int64_t i = (first + w) * 32 + lane;
      const bool inside = i < k;
      const Real value = inside ? static_cast<Real>(x[row * k + i]) : Real{0};
      const uint32_t word = __ballot_sync(kAllLanes, inside && value >= 0);
      nan |= __ballot_sync(kAllLanes, value != value);
      set += __popc(word);
      if (w == lane) mine = word;
    }
    if (lane < count) out.bits[row * out.words + first + lane] = mine;
  }
  if (lane == 0) {
    found.set[warp] = set;
    found.nan[warp] = nan;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) {
    set += found.set[w];
    nan |= found.nan[w];
  }
  out.set[row] = set;
  if (out.scale != nullptr) out.scale[row] = nan != 0 ? __int_as_float(0x7fc00000) : 1.f;
}

template <typename X>
void run(const void* x, int64_t rows, int64_t k, const Signs& out, Stream stream) {
  launch(signs_of_row<X>, dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0, stream,
         static_cast<const X*>(x), k, out);
}

}  // namespace

void signs_of_rows(const void* x, Element type, int64_t rows, int64_t k, const Signs& out,
                   Stream stream) {
  if (rows == 0) return;
  switch (type) {
    case Element::kFloat32:
      return run<float>(x, rows, k, out, stream);
    case Element::kBFloat16:
      return run<BFloat16>(x, rows, k, out, stream);
    case Element::kFloat16:
      return run<Half>(x, rows, k, out, stream);
    case Element::kFloat64:
      return run<double>(x, rows, k, out, stream);
    case Element::kInt8:
      return run<int8_t>(x, rows, k, out, stream);
  }
}

}  // namespace qfx::cuda
