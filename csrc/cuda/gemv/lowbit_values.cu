// lowbit_values of lowbit.h. A block has 64 octets of the columns of a panel, and a warp 8 of 16
// columns at once: it reads 64 consecutive bytes of an octet and, as 16-bit floats, writes 128 of a
// row. (Q14)
#include "cuda/gemv/lowbit_codes.cuh"

namespace qfx::cuda {
namespace {

constexpr int kOctetsOfWarp = 8;
constexpr int kAtOnce = 2;  // octets of a thread, loaded before the first is used
constexpr int kThreads = 256, kStep = kThreads / kQuads, kOctetsOfBlock = kAtOnce * kStep;

// The rows [w.n][k] of floats that are written.
template <typename T>
struct ValueRows {
  T* first;
  int64_t k;
  bool vectors;  // they begin at multiples of 16 bytes
};

// Writes the values of an octet of 4 columns, from column n on and from k on.
template <int kBits, Shift kShift, typename T>
__device__ __forceinline__ void store_octet(bool bfloat16, const Octet& octet, int columns,
                                            const ValueRows<T>& rows, int64_t n, int64_t k) {
  constexpr bool kMinimums = kShift == Shift::kMinimums;
  const int64_t left = rows.k - k;
  const int count = static_cast<int>(left < kOctet ? left : kOctet);
  const unsigned zeros = kMinimums ? 0u : octet.shift.x;
  float scale[kQuad], minimum[kQuad] = {};
  floats_of_halves(octet.scale, bfloat16, scale);
  if (kMinimums) floats_of_halves(octet.shift, bfloat16, minimum);
  T* to = rows.first + n * rows.k + k;
#pragma unroll
  for (int c = 0; c < kQuad; ++c, to += rows.k) {
    if (c >= columns) continue;
    float v[kOctet];
    floats_of_octet<kBits>(octet, c, above_two_to_23(zeros, c), v);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      v[j] = v[j] * scale[c];
      if (kMinimums) v[j] = v[j] + minimum[c];
    }
    store_piece(to, count, rows.vectors, v);
  }
}

template <int kBits, typename T>
__global__ void __launch_bounds__(kThreads, 4) values_kernel(LowbitWeight w, ValueRows<T> rows) {
  const int octets = static_cast<int>((rows.k + kOctet - 1) / kOctet);
  const int parts = (octets + kOctetsOfBlock - 1) / kOctetsOfBlock;
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int quad = thread / kOctetsOfWarp % kQuads;
  const int first = block % parts * kOctetsOfBlock +
                    thread / (kOctetsOfWarp * kQuads) * kOctetsOfWarp + thread % kOctetsOfWarp;
  const int64_t panel = block / parts, n = panel * LowbitWeight::kPanel + kQuad * quad;
  const int columns = static_cast<int>(w.n - n < kQuad ? w.n - n : kQuad);
  const LowbitHeader header = header_of(w);
  const LowbitLane lane =
      lane_of(w, header, panel, static_cast<unsigned>(first), static_cast<unsigned>(quad));
  with_shift(header.shift, [&](auto shift) {
    constexpr Shift kShift = decltype(shift)::value;
    Octet loaded[kAtOnce] = {};
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int i = first + a * kStep;
      if (i < octets) loaded[a] = load_octet<kBits, kShift>(lane, i);
    }
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int i = first + a * kStep;
      if (i >= octets) continue;
      store_octet<kBits, kShift>(header.bfloat16, loaded[a], columns, rows, n, int64_t{i} * kOctet);
    }
  });
}

template <int kBits, typename T>
void run(const LowbitWeight& w, const ValueRows<T>& rows, Stream stream) {
  const int64_t parts = ceil_div(ceil_div(rows.k, kOctet), kOctetsOfBlock);
  launch(values_kernel<kBits, T>, dim3(static_cast<unsigned>(w.panels() * parts)), dim3(kThreads),
         0, stream, w, rows);
}

}  // namespace

void lowbit_values(const LowbitWeight& w, int64_t k, Dtype dtype, void* values, Stream stream) {
  if (w.n == 0 || k == 0) return;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool vectors = reinterpret_cast<uintptr_t>(values) % 16 == 0 && k * sizeof(T) % 16 == 0;
    const ValueRows<T> rows = {static_cast<T*>(values), k, vectors};
    if (w.bits == 4) return run<4>(w, rows, stream);
    run<5>(w, rows, stream);
  });
}

}  // namespace qfx::cuda
