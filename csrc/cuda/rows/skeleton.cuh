// Kernels over rows of floats. A team of threads has one row: a warp for short rows, a block for
// longer ones, which hold it in registers, so that it is read once; the longest are read again each
// time they are used. What is done with a row is a value, `use`, called with the row:
//     row.m                     its number
//     row.extremes()            of its elements, transformed (R1), in all threads of the team
//     row.each(f)               f(k, count, v): elements k..k + count - 1 that this thread has
#pragma once

#include "cuda/rows/quantize.h"
#include "cuda/rows/rotate.cuh"

namespace qfx::cuda {

// Bit patterns: as signed integers those of positive floats are in order and above all negative
// ones; as unsigned integers those of negative floats are in reverse order and above all positive.
struct Extremes {
  int32_t most = 0;    // the greatest signed pattern, or 0
  uint32_t least = 0;  // the greatest unsigned pattern

  __device__ __forceinline__ void include(float x) {
    most = max(most, __float_as_int(x));
    least = max(least, __float_as_uint(x));
  }
  __device__ __forceinline__ void include(const Extremes& other) {
    most = max(most, other.most);
    least = max(least, other.least);
  }
};

constexpr int kWarpThreads = 32, kBlockThreads = 256, kWarpsPerBlock = kBlockThreads / kWarpThreads;

__device__ __forceinline__ Extremes extremes_of_warp(Extremes e) {
#pragma unroll
  for (int i = kWarpThreads / 2; i > 0; i /= 2) {
    e.include(
        Extremes{__shfl_xor_sync(kAllLanes, e.most, i), __shfl_xor_sync(kAllLanes, e.least, i)});
  }
  return e;
}

template <int kWarps>
struct ExtremesOfWarps {
  int32_t most[kWarps];
  uint32_t least[kWarps];
};

template <int kWarps>
__device__ __forceinline__ Extremes extremes_of_block(Extremes e) {
  ExtremesOfWarps<kWarps>& all = static_shared<ExtremesOfWarps<kWarps>>();
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  e = extremes_of_warp(e);
  if (threadIdx.x % kWarpThreads == 0) {
    all.most[warp] = e.most;
    all.least[warp] = e.least;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) e.include(Extremes{all.most[i], all.least[i]});
  return e;
}

// What the rows below share: who this thread is, and one piece of its row.
template <typename T, bool kBack, int kTeam>
struct RowOf {
  using Element = T;
  static constexpr int kThreads = kTeam == kWarpThreads ? kWarpsPerBlock * kWarpThreads : kTeam;
  static constexpr int kStep = kTeam * kPiece;  // elements that a team has at a time

  const FloatRows& x;
  const int64_t m;
  const T* const from;
  const bool aligned;

  static __device__ __forceinline__ int64_t number() {
    return int64_t{blockIdx.x} * (kThreads / kTeam) + static_cast<int>(threadIdx.x) / kTeam;
  }

  __device__ __forceinline__ RowOf(const FloatRows& rows, int64_t number)
      : x(rows),
        m(number),
        from(static_cast<const T*>(rows.data) + number * rows.columns),
        aligned((reinterpret_cast<uintptr_t>(rows.data) | rows.columns * sizeof(T)) % 16 == 0) {}

  // First element of this thread's piece among those that the team has at `base`.
  static __device__ __forceinline__ int64_t place(int64_t base) {
    return base + static_cast<int>(threadIdx.x) % kTeam * kPiece;
  }
  __device__ __forceinline__ int count(int64_t k) const {
    const int64_t left = x.columns - k;
    return static_cast<int>(left < 0 ? 0 : left < kPiece ? left : kPiece);
  }
  __device__ __forceinline__ void read(int64_t k, float (&v)[kPiece]) const {
    load_piece(from + k, count(k), aligned, v);
    transform_piece<kBack>(x.transform, x.columns, k, count(k), v);
  }
  static __device__ __forceinline__ Extremes of_team(const Extremes& e) {
    if constexpr (kTeam == kWarpThreads) return extremes_of_warp(e);
    return extremes_of_block<kTeam / kWarpThreads>(e);
  }
  template <typename Row>
  static __device__ __forceinline__ Extremes extremes_of(Row& row) {
    Extremes found;
    row.each([&](int64_t, int count, const float (&v)[kPiece]) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        if (i < count) found.include(v[i]);
      }
    });
    return of_team(found);
  }
};

// A row of at most kMost elements, in registers.
template <typename T, bool kBack, int kTeam>
struct RegisterRow : RowOf<T, kBack, kTeam> {
  using Base = RowOf<T, kBack, kTeam>;
  static constexpr int kPieces = 4;
  static constexpr int64_t kMost = int64_t{kPieces} * Base::kStep;

  float held[kPieces][kPiece];

  __device__ __forceinline__ RegisterRow(const FloatRows& rows, int64_t number)
      : Base(rows, number) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) this->read(Base::place(p * Base::kStep), held[p]);
  }
  __device__ __forceinline__ Extremes extremes() { return Base::extremes_of(*this); }
  template <typename F>
  __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int64_t k = Base::place(p * Base::kStep);
      if (this->count(k) > 0) f(k, this->count(k), held[p]);
    }
  }
};

// A row of any length, read each time it is used.
template <typename T, bool kBack, int kTeam>
struct LongRow : RowOf<T, kBack, kTeam> {
  using Base = RowOf<T, kBack, kTeam>;
  using Base::Base;

  __device__ __forceinline__ Extremes extremes() { return Base::extremes_of(*this); }
  template <typename F>
  __device__ __forceinline__ void each(const F& f) {
    for (int64_t base = 0; base < this->x.columns; base += Base::kStep) {
      const int64_t k = Base::place(base);
      float v[kPiece];
      this->read(k, v);
      if (this->count(k) > 0) f(k, this->count(k), v);
    }
  }
};

template <typename Row, typename Use>
__global__ void __launch_bounds__(Row::kThreads) rows_kernel(FloatRows x, Use use) {
  const int64_t m = Row::number();
  if (m >= x.rows) return;  // with its whole team
  Row row(x, m);
  use(row);
}

template <typename Row, typename Use>
void launch_rows(const FloatRows& x, const Use& use, Stream stream) {
  constexpr int64_t kRowsPerBlock = Row::kThreads / (Row::kStep / kPiece);
  const int64_t blocks = (x.rows + kRowsPerBlock - 1) / kRowsPerBlock;
  if (blocks == 0) return;
  launch(rows_kernel<Row, Use>, dim3(static_cast<unsigned>(blocks)), dim3(Row::kThreads), 0, stream,
         x, use);
}

template <bool kBack = false, typename Use>
void for_each_row(const FloatRows& x, const Use& use, Stream stream) {
  with_type(x.dtype, [&](auto type) {
    using T = decltype(type);
    using Short = RegisterRow<T, kBack, kWarpThreads>;
    using Middle = RegisterRow<T, kBack, kBlockThreads>;
    using Wide = RegisterRow<T, kBack, 2 * kBlockThreads>;
    if (x.columns <= Short::kMost) return launch_rows<Short>(x, use, stream);
    if (x.columns <= Middle::kMost) return launch_rows<Middle>(x, use, stream);
    if (x.columns <= Wide::kMost) return launch_rows<Wide>(x, use, stream);
    return launch_rows<LongRow<T, kBack, kBlockThreads>>(x, use, stream);
  });
}

}  // namespace qfx::cuda
