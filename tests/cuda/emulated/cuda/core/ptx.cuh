// The twin of csrc/cuda/core/ptx.cuh for the emulator: same names, in C++, after the PTX ISA.
#pragma once

#include <deque>
#include <tuple>
#include <utility>
#include <vector>

#include "builtins.h"
#include "cuda/core/stream.h"

namespace qfx::cuda {

#if !defined(QFX_EMULATED_ARCHITECTURE)
#define QFX_EMULATED_ARCHITECTURE 1000  // all instructions are there
#endif
constexpr int kArchitecture = QFX_EMULATED_ARCHITECTURE;
constexpr unsigned kAllLanes = 0xffffffffu;

// --- launching ---

template <unsigned kCluster = 1, typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            Stream /*stream*/, Arguments&&... arguments) {
  const std::tuple<std::decay_t<Parameters>...> given(std::forward<Arguments>(arguments)...);
  emulated::run_grid(
      {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes,
      [&] { std::apply(kernel, given); }, kCluster);
}

template <typename T>
inline T* dynamic_shared() {
  return static_cast<T*>(emulated::dynamic_shared_memory());
}

template <typename T>
inline T& static_shared() {
  alignas(T) static unsigned char memory[emulated::kMaxCluster][sizeof(T)];
  [[maybe_unused]] static const bool registered = [] {
    emulated::at_block_start(
        [](unsigned block) { std::memset(memory[block], emulated::kPoison, sizeof(T)); });
    return true;
  }();
  return *reinterpret_cast<T*>(memory[emulated::block_in_cluster()]);
}

// --- memory ---

template <typename T>
inline T load_once(const T* p) {
  return __ldcs(p);
}
template <typename T>
inline void store_once(T* p, T value) {
  __stcs(p, value);
}

template <typename T>
inline void store_vector(T* p, T value) {
  __stcg(p, value);
}

// Of dynamic shared memory: from its beginning, which is 1024-byte aligned.
inline unsigned shared_address(const void* p) {
  const char* base = static_cast<const char*>(emulated::dynamic_shared_memory());
  return static_cast<unsigned>(static_cast<const char*>(p) - base);
}

// The copies of each thread of the block, by group; the last group is open.
struct AsyncCopies {
  struct Copy {
    void* to;
    unsigned char bytes[16];
    void arrive() const { std::memcpy(to, bytes, 16); }
  };
  std::deque<std::vector<Copy>> groups{{}};
};
inline AsyncCopies& async_copies() {
  static std::vector<AsyncCopies> of_thread[emulated::kMaxCluster];
  [[maybe_unused]] static const bool registered = [] {
    emulated::at_block_start([](unsigned block) { of_thread[block].assign(1024, {}); });
    return true;
  }();
  return of_thread[emulated::block_in_cluster()][emulated::thread_index()];
}

// The bytes arrive at once or only when they are waited for; until then there is poison.
inline void copy_async(void* shared, const void* global, int bytes = 16) {
  const auto misaligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; };
  if (misaligned(shared) || misaligned(global))
    emulated::fault("cp.async of 16 bytes at an address that is no multiple of 16");
  AsyncCopies::Copy copy = {shared, {}};
  std::memcpy(copy.bytes, global, static_cast<size_t>(bytes));
  std::memset(shared, emulated::kPoison, 16);
  if (emulated::random_below(2) == 0) return copy.arrive();
  async_copies().groups.back().push_back(copy);
}
inline void copy_async_commit() { async_copies().groups.emplace_back(); }
template <int kLeft>
inline void copy_async_wait() {
  auto& groups = async_copies().groups;
  while (groups.size() > size_t{kLeft} + 1) {
    for (const auto& copy : groups.front()) copy.arrive();
    groups.pop_front();
  }
}

// --- barriers ---

inline void barrier_sync(int id, int count) { emulated::barrier_sync(id, count); }
inline void barrier_arrive(int id, int count) { emulated::barrier_arrive(id, count); }

// --- matrix products of a warp ---

inline void load_matrices(unsigned (&r)[4], const void* row) {
  struct Load {
    const unsigned char* row;
    unsigned* r;
  } mine = {static_cast<const unsigned char*>(row), r};
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
    emulated::fault("ldmatrix of a row at an address that is no multiple of 16");
  emulated::meet("ldmatrix", kAllLanes, &mine, [](void* const* lanes, uint32_t) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const auto* from = static_cast<Load*>(lanes[8 * i + lane / 4])->row + 4 * (lane % 4);
        std::memcpy(static_cast<Load*>(lanes[lane])->r + i, from, 4);
      }
    }
  });
}

// What a lane brings to a product.
struct Fragments {
  int* d;
  const unsigned *a, *b;
};

inline int8_t byte_of(unsigned word, int i) { return static_cast<int8_t>(word >> 8 * i); }

// Register and lane that hold element [row][k] of a, with `per` elements in a register and
// registers in the order rows 0-7 and 8-15 of the first half of k, then of the second half.
inline unsigned word_of_a(void* const* lanes, int row, int k, int per) {
  const int half = k / (4 * per), lane = row % 8 * 4 + k / per % 4;
  return static_cast<Fragments*>(lanes[lane])->a[row / 8 + 2 * half];
}
inline unsigned word_of_b(void* const* lanes, int k, int column, int per) {
  const int half = k / (4 * per), lane = column * 4 + k / per % 4;
  return static_cast<Fragments*>(lanes[lane])->b[half];
}
inline int& element_of_d(void* const* lanes, int row, int column) {
  const int lane = row % 8 * 4 + column / 2;
  return static_cast<Fragments*>(lanes[lane])->d[row / 8 * 2 + column % 2];
}

template <int kRows, int kDepth>
inline void multiply_bytes(void* const* lanes, uint32_t) {
  int8_t a[kRows][kDepth], b[8][kDepth];  // first, for the compiler's sake
  for (int k = 0; k < kDepth; ++k) {
    for (int m = 0; m < kRows; ++m) a[m][k] = byte_of(word_of_a(lanes, m, k, 4), k % 4);
    for (int n = 0; n < 8; ++n) b[n][k] = byte_of(word_of_b(lanes, k, n, 4), k % 4);
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < 8; ++n) {
      int sum = 0;
      for (int k = 0; k < kDepth; ++k) sum += a[m][k] * b[n][k];
      int& d = element_of_d(lanes, m, n);
      d = static_cast<int>(static_cast<unsigned>(d) + static_cast<unsigned>(sum));
    }
  }
}

inline void mma_s8_8x8x16(int (&d)[2], unsigned a, unsigned b) {
  Fragments mine = {d, &a, &b};
  emulated::meet("mma.m8n8k16.s8", kAllLanes, &mine, multiply_bytes<8, 16>);
}

inline void mma_s8_16x8x32(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  Fragments mine = {d, a, b};
  emulated::meet("mma.m16n8k32.s8", kAllLanes, &mine, multiply_bytes<16, 32>);
}

inline void mma_xor_8x8x128(int (&d)[2], unsigned a, unsigned b) {
  Fragments mine = {d, &a, &b};
  emulated::meet("mma.m8n8k128.b1", kAllLanes, &mine, [](void* const* lanes, uint32_t) {
    for (int m = 0; m < 8; ++m) {
      for (int n = 0; n < 8; ++n) {
        for (int k = 0; k < 128; k += 32) {
          const unsigned either = word_of_a(lanes, m, k, 32) ^ word_of_b(lanes, k, n, 32);
          element_of_d(lanes, m, n) += std::popcount(either);
        }
      }
    }
  });
}

inline void mma_b1_16x8x256(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  Fragments mine = {d, a, b};
  emulated::meet("mma.m16n8k256.b1", kAllLanes, &mine, [](void* const* lanes, uint32_t) {
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 8; ++n) {
        for (int k = 0; k < 256; k += 32) {
          const unsigned both = word_of_a(lanes, m, k, 32) & word_of_b(lanes, k, n, 32);
          element_of_d(lanes, m, n) += std::popcount(both);
        }
      }
    }
  });
}

// --- 16-bit floats ---

inline float value_of_bf16(unsigned bits) { return std::bit_cast<float>(bits << 16); }

inline float value_of_f16(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
  float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                               : std::ldexp(static_cast<float>(fraction + (exponent ? 1024 : 0)),
                                            std::max(exponent, 1) - 25);
  return bits >> 15 & 1 ? -value : value;
}

// Sums are rounded once, where the ISA leaves open how.
template <float (*kValue)(unsigned)>
inline void multiply_floats(void* const* lanes, uint32_t) {
  const auto element = [](unsigned word, int k) { return kValue(word >> (16 * (k % 2)) & 0xffff); };
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      int& d = element_of_d(lanes, m, n);
      double sum = std::bit_cast<float>(d);
      for (int k = 0; k < 16; ++k) {
        sum +=
            double{element(word_of_a(lanes, m, k, 2), k)} * element(word_of_b(lanes, k, n, 2), k);
      }
      d = std::bit_cast<int>(static_cast<float>(sum));
    }
  }
}

template <float (*kValue)(unsigned)>
inline void mma_floats(const char* what, float (&d)[4], const unsigned (&a)[4],
                       const unsigned (&b)[2]) {
  int sums[4];
  std::memcpy(sums, d, sizeof(sums));
  Fragments mine = {sums, a, b};
  emulated::meet(what, kAllLanes, &mine, multiply_floats<kValue>);
  std::memcpy(d, sums, sizeof(sums));
}

inline void mma_bf16_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  mma_floats<value_of_bf16>("mma.m16n8k16.bf16", d, a, b);
}
inline void mma_f16_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  mma_floats<value_of_f16>("mma.m16n8k16.f16", d, a, b);
}

// The difference of two pairs of small integers, whose bits are those of the sign and of a normal
// float with `fraction` bits.
template <float (*kValue)(unsigned)>
inline unsigned subtract_pairs(unsigned a, unsigned b, int fraction, int bias) {
  unsigned pair = 0;
  for (int i = 0; i < 2; ++i) {
    const float of[] = {kValue(a >> (16 * i) & 0xffff), kValue(b >> (16 * i) & 0xffff)};
    const float value = of[0] - of[1];
    const unsigned bits = std::bit_cast<unsigned>(std::abs(value));
    unsigned half = value == 0 ? 0 : (bits >> (23 - fraction)) - ((127u - bias) << fraction);
    if (value < 0) half |= 0x8000u;
    if (kValue(half) != value) emulated::fault("a difference of 16-bit floats that is not exact");
    pair |= half << (16 * i);
  }
  return pair;
}
inline unsigned subtract_bf16(unsigned a, unsigned b) {
  return subtract_pairs<value_of_bf16>(a, b, 7, 127);
}
inline unsigned subtract_f16(unsigned a, unsigned b) {
  return subtract_pairs<value_of_f16>(a, b, 10, 15);
}

}  // namespace qfx::cuda
