// CUDA's language and builtin functions for a host compiler, on top of fibers.h: what the kernels
// of csrc/cuda use. Same names, same results.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static  // blocks run one after another, but for clusters
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (qfx::emulated::place().thread)
#define blockIdx (qfx::emulated::place().block)
#define blockDim (qfx::emulated::place().block_size)
#define gridDim (qfx::emulated::place().grid_size)
constexpr int warpSize = 32;

// --- vector types ---

#define QFX_VECTORS(T, name, size)                                   \
  struct alignas(sizeof(T) * 2) name##2 { T x, y; };                 \
  struct name##3 { T x, y, z; };                                     \
  struct alignas(size) name##4 { T x, y, z, w; };                    \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
QFX_VECTORS(signed char, char, 4)
QFX_VECTORS(unsigned char, uchar, 4)
QFX_VECTORS(short, short, 8)
QFX_VECTORS(unsigned short, ushort, 8)
QFX_VECTORS(int, int, 16)
QFX_VECTORS(unsigned, uint, 16)
QFX_VECTORS(float, float, 16)
#undef QFX_VECTORS
struct alignas(16) longlong2 {
  long long x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// --- bits and numbers ---

using std::max;
using std::min;

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }

// Saturates, and NaN gives 0, as the instruction does.
inline int __float2int_rn(float x) {
  if (x != x) return 0;
  if (x >= 0x1p31f) return INT32_MAX;
  if (x <= -0x1p31f) return INT32_MIN;
  return static_cast<int>(std::nearbyintf(x));
}
inline int __float2int_rd(float x) { return __float2int_rn(std::floor(x)); }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}

// Byte i of the result: byte (s >> 4 i) & 7 of b:a, or its sign eight times where bit 3 is set.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned select = s >> 4 * i & 15;
    unsigned byte = static_cast<unsigned>(bytes >> 8 * (select & 7)) & 0xff;
    if ((select & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
    result |= byte << 8 * i;
  }
  return result;
}

inline int __dp4a(int a, int b, int c) {
  unsigned sum = static_cast<unsigned>(c);
  for (int i = 0; i < 32; i += 8) {
    sum += static_cast<unsigned>(static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i));
  }
  return static_cast<int>(sum);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 0xff) * (b >> i & 0xff);
  return c;
}

// --- memory ---

// Vector accesses fault at addresses that are no multiple of their size.
template <typename T>
inline const T* qfx_aligned(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T) != 0) {
    qfx::emulated::fault("access of " + std::to_string(sizeof(T)) +
                         " bytes at an address that is no multiple of " +
                         std::to_string(alignof(T)));
  }
  return p;
}
template <typename T>
inline T __ldg(const T* p) {
  return *qfx_aligned(p);
}
template <typename T>
inline T __ldcs(const T* p) {
  return *qfx_aligned(p);
}
template <typename T>
inline T __ldcg(const T* p) {
  return *qfx_aligned(p);
}
template <typename T>
inline void __stcs(T* p, T value) {
  *const_cast<T*>(qfx_aligned(p)) = value;
}
template <typename T>
inline void __stcg(T* p, T value) {
  *const_cast<T*>(qfx_aligned(p)) = value;
}

// --- atomics: on integers only, since sums of floats depend on the order ---

template <typename T, typename F>
inline T qfx_atomic(T* p, F change) {
  qfx::emulated::perhaps_yield();
  const T before = *qfx_aligned(p);
  *p = change(before);
  return before;
}
inline int atomicAdd(int* p, int v) {
  return qfx_atomic(p, [=](int b) { return static_cast<int>(unsigned(b) + unsigned(v)); });
}
inline unsigned atomicAdd(unsigned* p, unsigned v) {
  return qfx_atomic(p, [=](unsigned b) { return b + v; });
}
inline int atomicMax(int* p, int v) {
  return qfx_atomic(p, [=](int b) { return std::max(b, v); });
}
inline unsigned atomicMax(unsigned* p, unsigned v) {
  return qfx_atomic(p, [=](unsigned b) { return std::max(b, v); });
}
inline int atomicMin(int* p, int v) {
  return qfx_atomic(p, [=](int b) { return std::min(b, v); });
}
inline unsigned atomicMin(unsigned* p, unsigned v) {
  return qfx_atomic(p, [=](unsigned b) { return std::min(b, v); });
}
inline unsigned atomicOr(unsigned* p, unsigned v) {
  return qfx_atomic(p, [=](unsigned b) { return b | v; });
}
inline int atomicExch(int* p, int v) {
  return qfx_atomic(p, [=](int) { return v; });
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// --- blocks and warps ---

inline void __syncthreads() { qfx::emulated::sync_block(); }
inline void __syncwarp(unsigned mask = ~0u) {
  qfx::emulated::meet("__syncwarp", mask, nullptr, [](void* const*, uint32_t) {});
}

// What a lane brings to a shuffle: its value, the lane it reads from, room for the answer.
struct QfxShuffle {
  uint64_t value, result;
  int from;
};
template <typename T>
inline T qfx_shuffle(const char* what, unsigned mask, T value, int from) {
  static_assert(sizeof(T) <= 8);
  QfxShuffle mine = {0, 0, from};
  std::memcpy(&mine.value, &value, sizeof(T));
  qfx::emulated::meet(what, mask, &mine, [](void* const* lanes, uint32_t there) {
    for (int i = 0; i < 32; ++i) {
      if ((there >> i & 1) == 0) continue;
      QfxShuffle* to = static_cast<QfxShuffle*>(lanes[i]);
      const bool given = (there >> to->from & 1) != 0;  // else CUDA leaves it undefined
      to->result = given ? static_cast<QfxShuffle*>(lanes[to->from])->value : 0xcbcbcbcbcbcbcbcb;
    }
  });
  std::memcpy(&value, &mine.result, sizeof(T));
  return value;
}
// Lanes of a part of the warp that is `width` wide; those outside of it keep their own value.
template <typename T>
inline T qfx_shuffle_within(const char* what, unsigned mask, T value, int from, int width) {
  const int lane = static_cast<int>(qfx::emulated::lane()), base = lane / width * width;
  const bool inside = from >= base && from < base + width;
  return qfx_shuffle(what, mask, value, inside ? from : lane);
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const int lane = static_cast<int>(qfx::emulated::lane());
  return qfx_shuffle("__shfl_sync", mask, value, lane / width * width + (from & (width - 1)));
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
  const int lane = static_cast<int>(qfx::emulated::lane());
  return qfx_shuffle_within("__shfl_xor_sync", mask, value, lane ^ with, width);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int lane = static_cast<int>(qfx::emulated::lane());
  return qfx_shuffle_within("__shfl_down_sync", mask, value, lane + static_cast<int>(by), width);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int lane = static_cast<int>(qfx::emulated::lane());
  return qfx_shuffle_within("__shfl_up_sync", mask, value, lane - static_cast<int>(by), width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  struct Ballot {
    bool vote;
    unsigned result;
  } mine = {predicate != 0, 0};
  qfx::emulated::meet("__ballot_sync", mask, &mine, [](void* const* lanes, uint32_t there) {
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) {
      if ((there >> i & 1) != 0 && static_cast<Ballot*>(lanes[i])->vote) result |= 1u << i;
    }
    for (int i = 0; i < 32; ++i) {
      if ((there >> i & 1) != 0) static_cast<Ballot*>(lanes[i])->result = result;
    }
  });
  return mine.result;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
