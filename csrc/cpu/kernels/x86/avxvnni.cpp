// AVX-VNNI: vpdpbusd on 256-bit registers, u8 x s8 summed in 32 bits, which never saturates.
// Operand format: u8 = q + 128; the row constant 128 * colsum[n] is taken off in the epilogue.
#include <immintrin.h>

#include "cpu/kernels/rows/offset.h"
#include "cpu/kernels/x86/group_tiles256.h"
#include "cpu/kernels/x86/lowbit256.h"
#include "cpu/kernels/x86/multiply_chains.h"

namespace qfx::cpu {
namespace {

struct Offset {
  static constexpr int kDepth = 1, kBytes = 1, kAccumulators = 12;
  __m256i code;
  explicit Offset(const uint8_t* a) : code(broadcast(a)) {}
  __m256i add(__m256i acc, const int8_t* w) const {
    return _mm256_dpbusd_avx_epi32(acc, code, load(w));
  }
};

int64_t multiply(int64_t rounds) {
  const __m256i b = _mm256_set1_epi8(1);
  const auto next = [&](__m256i x, __m256i a) { return _mm256_dpbusd_avx_epi32(x, a, b); };
  return 32 * run_chains<12>(rounds, b, next);
}

constexpr Format kFormat = {.name = "s8s8",
                            .tile_rows = kTallest<Offset>,
                            .bytes_per_code = 1,
                            .k_multiple = 16,
                            .mul_offset = 128,
                            .tiles = kTiles<Offset, kNothing>.data(),
                            .prefetching_tiles = kTiles<Offset, kT1>.data(),
                            .narrow_tiles = kNarrowTiles<Offset>.data(),
                            .arrange = arrange_offset<128>,
                            .multiply = multiply,
                            .few = few_tiles<Offset>(),
                            .groups = &kGroups<Offset>};

struct LowbitCodes {
  template <int kBits>
  static constexpr int kLines = 0;
  static constexpr bool kUnsigned = true;
  static constexpr int kPairRows = 4;
  static __m256i add(__m256i sums, __m256i u, __m256i q) {
    return _mm256_dpbusd_avx_epi32(sums, u, q);
  }
  static __m256i close(__m256i sums) { return sums; }
};

constexpr LowbitKernels kLowbit =
    lowbit_kernels<LowbitTiles<LowbitCodes>>(unpack_group256<4>, unpack_group256<5>);

}  // namespace

const Kernels& kernels_avxvnni() {
  const Kernels& avx2 = kernels_avx2();
  static const Kernels kernels = {"avxvnni", avx2.row,
                                  avx2.sums, avx2.attention,
                                  &kLowbit,  {&kFormat, &kFormat, &kFormat, &kFormat}};
  return kernels;
}

}  // namespace qfx::cpu
