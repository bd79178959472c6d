// Random bits of a counter: Philox-4x32 with 7 rounds, the fewest that pass BigCrush (Salmon,
// Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011). (Q7)
//     bits[i] = halves of philox(key = seed, counter = 8 (i / 64) + i % 32 / 4)
// namely half i % 4 of the words 0, 1 (i % 64 < 32) or 2, 3, the low half of a word first. So eight
// blocks side by side give 64 elements, and each lane holds its words where the next product wants
// them. Compiled by each instruction set's file with its own flags.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/rows.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qfx::cpu {
namespace {

constexpr int kLanes = 8, kRounds = 7;
static_assert(kRandomGroup == kLanes * 8);
typedef uint64_t Lanes __attribute__((vector_size(8 * kLanes)));

// Of the low 32 bits of each lane; the high ones may hold anything.
inline void multiply_lanes(const Lanes& a, uint32_t by, Lanes& product) {
#if defined(__AVX512F__)
  product = (Lanes)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(by));
#elif defined(__AVX2__)
  const __m256i factor = _mm256_set1_epi64x(by);
  const __m256i* from = reinterpret_cast<const __m256i*>(&a);
  __m256i* to = reinterpret_cast<__m256i*>(&product);
  to[0] = _mm256_mul_epu32(from[0], factor);
  to[1] = _mm256_mul_epu32(from[1], factor);
#else
  product = (a & 0xffffffffu) * by;
#endif
}

// bits[64 groups] of element 64 `first` and those that follow.
inline void random_groups(uint64_t seed, int64_t first, int64_t groups, uint16_t* bits) {
  constexpr uint32_t kMultiply0 = 0xD2511F53, kMultiply1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int64_t g = first; g < first + groups; ++g, bits += kRandomGroup) {
    const uint64_t counter = static_cast<uint64_t>(g) * kLanes;
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    Lanes c0 = Lanes{0, 1, 2, 3, 4, 5, 6, 7} + counter, c1 = Lanes{} + (counter >> 32);
    Lanes c2 = {}, c3 = {}, p0, p1;
#pragma GCC unroll 7
    for (int round = 0; round < kRounds; ++round, key0 += kWeyl0, key1 += kWeyl1) {
      multiply_lanes(c0, kMultiply0, p0);
      multiply_lanes(c2, kMultiply1, p1);
      c0 = (p1 >> 32) ^ c1 ^ key0;
      c2 = (p0 >> 32) ^ c3 ^ key1;
      c1 = p1;
      c3 = p0;
    }
    const Lanes words[2] = {(c0 & 0xffffffffu) | c1 << 32, (c2 & 0xffffffffu) | c3 << 32};
    __builtin_memcpy(bits, words, sizeof(words));
  }
}

}  // namespace
}  // namespace qfx::cpu
