// The packed int8 weight on a GPU, one flat buffer of bytes. There is no header, which the host
// could not read without waiting for the GPU: sizes say everything, K of x and the rest from the
// operator's `layout`.
//     colsum int32 [N4], W int8 [N][Kp]
// N4 is N rounded up to 4, Kp is K rounded up to 16; the padding is zero. Where the products of
// each `group` consecutive k, a multiple of 64, are summed by themselves, it goes on with the sums
// of each of the G = ceil(K / group) groups, and with zeros whose number gives `group`, which G
// leaves open:
//     group_sums int32 [N][G], zeros int8 [group / 64]
// Zeros up to a multiple of 16 bytes follow, then what the codes stand for, S = G where groups have
// scales of their own, else 1:
//     scale float32 [N][S], zero point int32 [N][S]
// the last only with `shift`. Rows of K with a pitch of 16 bytes are what vector loads, cp.async
// and TMA want.
#pragma once

#include <algorithm>
#include <cstdint>

#include "types.h"

#if defined(__CUDACC__)
#define QFX_DEVICE __host__ __device__
#else
#define QFX_DEVICE
#endif

namespace qfx::cuda {

inline constexpr int64_t kPitch = 16, kColumnMultiple = 4;

QFX_DEVICE inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

struct WeightLayout {
  int64_t n, k;
  int64_t group = 0;          // 0: the products of all of K are one sum
  bool group_scales = false;  // a scale for each group, else one for each row
  bool shift = false;         // with zero points

  // A group longer than K is as good as one that holds it.
  static WeightLayout of(int64_t n, int64_t k, int64_t group, int64_t scale_group, bool shift) {
    const int64_t all = std::max(round_up(k, kCudaGroupMultiple), kCudaGroupMultiple);
    return {n, k, std::min(group, all), scale_group != 0, shift};
  }

  QFX_DEVICE int64_t pitch() const { return round_up(k, kPitch); }
  QFX_DEVICE int64_t groups() const { return group == 0 ? 0 : (k + group - 1) / group; }
  QFX_DEVICE int64_t scales() const { return group_scales ? groups() : 1; }
  QFX_DEVICE int64_t weights_at() const { return 4 * round_up(n, kColumnMultiple); }
  QFX_DEVICE int64_t group_sums_at() const { return weights_at() + n * pitch(); }
  QFX_DEVICE int64_t tail_at() const { return group_sums_at() + 4 * n * groups(); }
  QFX_DEVICE int64_t scale_at() const {
    return round_up(tail_at() + group / kCudaGroupMultiple, kPitch);
  }
  QFX_DEVICE int64_t zero_point_at() const { return scale_at() + 4 * n * scales(); }
  QFX_DEVICE int64_t bytes() const { return zero_point_at() + (shift ? 4 * n * scales() : 0); }
};

// Where the parts of a packed weight lie in the GPU's memory.
struct PackedWeight {
  WeightLayout layout;
  const int32_t* colsum;
  const int8_t* w;            // w[n * layout.pitch() + k]
  const int32_t* group_sums;  // [N][G], null without groups
  const float* scale;         // [N][S]
  const int32_t* zero_point;  // [N][S], null without zero points

  PackedWeight(const WeightLayout& of, const int8_t* data)
      : layout(of),
        colsum(ints(data)),
        w(data + of.weights_at()),
        group_sums(of.group == 0 ? nullptr : ints(data + of.group_sums_at())),
        scale(reinterpret_cast<const float*>(data + of.scale_at())),
        zero_point(of.shift ? ints(data + of.zero_point_at()) : nullptr) {}

 private:
  static const int32_t* ints(const int8_t* at) { return reinterpret_cast<const int32_t*>(at); }
};

}  // namespace qfx::cuda
