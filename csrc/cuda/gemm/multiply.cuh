// Products of a warp's fragments and the copies that feed them, the same on every architecture from
// sm_75 on. Fragments are those of mma_s8_16x8x32 in ptx.cuh.
#pragma once

#include "cuda/core/ptx.cuh"

namespace qfx::cuda {

inline constexpr bool kHasWideProducts = kArchitecture >= 80;

// 16 bytes into shared memory, or zeros; there after copy_group_wait. sm_75 copies at once.
__device__ __forceinline__ void copy_chunk(void* shared, const void* global, bool there) {
  if constexpr (kHasWideProducts) {
    copy_async(shared, global, there ? 16 : 0);
  } else {
    const uint4* from = static_cast<const uint4*>(global);
    *static_cast<uint4*>(shared) = there ? *from : make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void copy_group_commit() {
  if constexpr (kHasWideProducts) copy_async_commit();
}

// Until all but the thread's latest kLeft groups of copies have arrived.
template <int kLeft>
__device__ __forceinline__ void copy_group_wait() {
  if constexpr (kHasWideProducts) copy_async_wait<kLeft>();
}

// d[16][8] += a[16][32] b[32][8] of int8, wrapping int32. On sm_75 as four products, of half the
// rows and half of k each.
struct MultiplyCodes {
  __device__ __forceinline__ void operator()(int (&d)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) const {
    if constexpr (kHasWideProducts) {
      mma_s8_16x8x32(d, a, b);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int half[2] = {d[2 * h], d[2 * h + 1]};
        mma_s8_8x8x16(half, a[h], b[0]);
        mma_s8_8x8x16(half, a[h + 2], b[1]);
        d[2 * h] = half[0];
        d[2 * h + 1] = half[1];
      }
    }
  }
};

// The same with 256 bits for 32 bytes: counts bits of p AND w. sm_75 has nothing but p XOR w.
struct MultiplyBits {
  __device__ __forceinline__ void operator()(int (&d)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) const {
    if constexpr (kHasWideProducts) {
      mma_b1_16x8x256(d, a, b);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int half[2] = {d[2 * h], d[2 * h + 1]};
        mma_xor_8x8x128(half, a[h], b[0]);
        mma_xor_8x8x128(half, a[h + 2], b[1]);
        d[2 * h] = half[0];
        d[2 * h + 1] = half[1];
      }
    }
  }
};

// sum_k of the products of k signs, from the bits that MultiplyBits counted and those that are set
// in either operand. (H1)
__device__ __forceinline__ int32_t sum_of_signs(int32_t counted, uint32_t k, uint32_t set_in_p,
                                                uint32_t set_in_w) {
  const uint32_t c = static_cast<uint32_t>(counted);
  if constexpr (kHasWideProducts)
    return static_cast<int32_t>(k - 2 * (set_in_p + set_in_w) + 4 * c);
  return static_cast<int32_t>(k - 2 * c);
}

}  // namespace qfx::cuda
