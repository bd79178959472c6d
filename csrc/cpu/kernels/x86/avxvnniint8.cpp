// AVX-VNNI-INT8: vpdpbssd, s8 x s8 summed in 32 bits on 256-bit registers.
// Operand format: the codes themselves, zero padded.
#include <immintrin.h>

#include "cpu/kernels/rows/offset.h"
#include "cpu/kernels/x86/group_tiles256.h"
#include "cpu/kernels/x86/lowbit256.h"

namespace qfx::cpu {
namespace {

struct Code {
  static constexpr int kDepth = 1, kBytes = 1, kAccumulators = 12;
  __m256i code;
  explicit Code(const uint8_t* a) : code(broadcast(a)) {}
  __m256i add(__m256i acc, const int8_t* w) const {
    return _mm256_dpbssd_epi32(acc, code, load(w));
  }
};

constexpr Format kFormat = {.name = "s8s8",
                            .tile_rows = kTallest<Code>,
                            .bytes_per_code = 1,
                            .k_multiple = 16,
                            .mul_offset = 0,
                            .tiles = kTiles<Code, kNothing>.data(),
                            .prefetching_tiles = kTiles<Code, kT0>.data(),
                            .narrow_tiles = kNarrowTiles<Code>.data(),
                            .arrange = arrange_offset<0>,
                            .few = few_tiles<Code>(),
                            .groups = &kGroups<Code>};

struct LowbitCodes {
  template <int kBits>
  static constexpr int kLines = 0;
  static constexpr bool kUnsigned = false;
  static constexpr int kPairRows = 4;
  static __m256i add(__m256i sums, __m256i u, __m256i q) { return _mm256_dpbssd_epi32(sums, u, q); }
  static __m256i close(__m256i sums) { return sums; }
};

constexpr LowbitKernels kLowbit =
    lowbit_kernels<LowbitTiles<LowbitCodes>>(unpack_group256<4>, unpack_group256<5>);

}  // namespace

const Kernels& kernels_avxvnniint8() {
  const Kernels& avx2 = kernels_avx2();
  static const Kernels kernels = {"avxvnniint8", avx2.row,
                                  avx2.sums,     avx2.attention,
                                  &kLowbit,      {&kFormat, &kFormat, &kFormat, &kFormat}};
  return kernels;
}

}  // namespace qfx::cpu
