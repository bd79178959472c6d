// Packed codes of 4 and 5 bits as lanes load them: 16 bytes at once, an octet, 8 consecutive k, of
// 4 neighbouring columns.
#pragma once

#include "cuda/core/types.cuh"
#include "cuda/gemv/lowbit.h"

namespace qfx::cuda {

inline constexpr int kQuad = 4;        // columns of a lane
inline constexpr int kOctet = kPiece;  // k of a load
inline constexpr int kQuads = LowbitWeight::kPanel / kQuad;
inline constexpr unsigned kTwoTo23 = 0x4b000000u;  // 2^23, whose low byte counts ones

// What a header says to the kernel.
struct LowbitHeader {
  Shift shift;
  bool bfloat16;  // scales and minimums, else float16
};

// What a lane loads of an octet.
struct Octet {
  uint4 nibbles;    // a word for each column: low nibbles k = 0..3, high ones k = 4..7
  unsigned fifths;  // 5 bits: bit 4 of k = j of column c at 4 c + j, of k = 4 + j at 16 + 4 c + j
  uint2 scale;      // four halves
  uint2 shift;      // four bytes or four halves
};

// Where a lane reads its octets, all at the same place in their groups: a warp steps over whole
// groups. Offsets are bytes from the panel.
struct LowbitLane {
  const uint8_t* panel;
  unsigned codes, fifths, scale, shift;  // offsets for group 0
  unsigned block, shift_block;           // to the next group
  int octets;                            // of a group, as a shift
};

__device__ __forceinline__ LowbitHeader header_of(const LowbitWeight& w) {
  const unsigned* words = reinterpret_cast<const unsigned*>(w.bytes);
  const unsigned scales = __ldg(words + LowbitWeight::kScalesWord);
  return {static_cast<Shift>(__ldg(words + LowbitWeight::kShiftWord)),
          static_cast<Dtype>(scales) == Dtype::kBFloat16};
}

// The lane with the octet `first` and those that follow it, and with columns of the panel from
// 4 quad on.
__device__ __forceinline__ LowbitLane lane_of(const LowbitWeight& w, const LowbitHeader& header,
                                              int64_t panel, unsigned first, unsigned quad) {
  constexpr unsigned kColumns = LowbitWeight::kPanel, kScales = 2 * kColumns;
  constexpr unsigned kNibbles = kOctet * kColumns / 2, kFifths = kOctet * kColumns / 8;
  const unsigned front = static_cast<unsigned>(w.front),
                 shift = static_cast<unsigned>(header.shift);
  const unsigned of_group = static_cast<unsigned>(w.group) / kOctet, octet = first % of_group;
  const unsigned group = front + kScales;
  return {w.bytes + LowbitWeight::kHeaderBytes + panel * w.panel,
          group + octet * kNibbles + 16 * quad,
          group + of_group * kNibbles + octet * kFifths + 2 * quad,
          front + 2 * kQuad * quad,
          kQuad * quad * shift,
          static_cast<unsigned>(w.block),
          kColumns * shift,
          31 - __clz(w.group / kOctet)};
}

template <typename T>
__device__ __forceinline__ T load_at(const LowbitLane& lane, unsigned offset) {
  return __ldg(reinterpret_cast<const T*>(lane.panel + offset));
}

// Calls use(ShiftValue<...>{}): loops are compiled for each shift.
template <Shift kValue>
struct ShiftValue {
  static constexpr Shift value = kValue;
};
template <typename Use>
__device__ __forceinline__ void with_shift(Shift shift, const Use& use) {
  if (shift == Shift::kNone) return use(ShiftValue<Shift::kNone>{});
  if (shift == Shift::kZeroPoints) return use(ShiftValue<Shift::kZeroPoints>{});
  use(ShiftValue<Shift::kMinimums>{});
}

template <int kBits, Shift kShift>
__device__ __forceinline__ Octet load_octet(const LowbitLane& lane, int i) {
  const unsigned g = static_cast<unsigned>(i) >> lane.octets, at = g * lane.block;
  const unsigned shifts = lane.shift + g * lane.shift_block;
  Octet octet = {};
  octet.nibbles = load_once(reinterpret_cast<const uint4*>(lane.panel + (lane.codes + at)));
  if (kBits == 5) {
    const unsigned short low = load_at<unsigned short>(lane, lane.fifths + at);
    const unsigned short high = load_at<unsigned short>(lane, lane.fifths + at + 2 * kQuads);
    octet.fifths = low | static_cast<unsigned>(high) << 16;
  }
  octet.scale = load_at<uint2>(lane, lane.scale + at);
  if (kShift == Shift::kNone) octet.shift.x = kBits == 5 ? 0x10101010u : 0x08080808u;
  if (kShift == Shift::kZeroPoints) octet.shift.x = load_at<unsigned>(lane, shifts);
  if (kShift == Shift::kMinimums) octet.shift = load_at<uint2>(lane, shifts);
  return octet;
}

__device__ __forceinline__ void floats_of_halves(uint2 bits, bool bfloat16, float (&f)[kQuad]) {
  const unsigned words[2] = {bits.x, bits.y};
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    const unsigned half = words[i / 2] >> (16 * (i % 2)) & 0xffffu;
    if (bfloat16) {
      f[i] = __uint_as_float(half << 16);
    } else {
      f[i] = static_cast<float>(Half(static_cast<uint16_t>(half), Half::from_bits()));
    }
  }
}

// 2^23 plus byte i of a word.
__device__ __forceinline__ float above_two_to_23(unsigned word, int i) {
  return __uint_as_float(__byte_perm(word, kTwoTo23, 0x7440u + static_cast<unsigned>(i)));
}

// The codes of column c less its zero point, exact.
template <int kBits>
__device__ __forceinline__ void floats_of_octet(const Octet& octet, int c, float zero,
                                                float (&f)[kOctet]) {
  const unsigned words[kQuad] = {octet.nibbles.x, octet.nibbles.y, octet.nibbles.z,
                                 octet.nibbles.w};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    unsigned codes = words[c] >> (4 * h) & 0x0f0f0f0fu;
    if (kBits == 5) {  // the product puts bit j at the place 8 j + 4, and others elsewhere
      const unsigned four = octet.fifths >> (16 * h + 4 * c) & 15u;
      codes |= four * 0x02040810u & 0x10101010u;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) f[4 * h + j] = above_two_to_23(codes, j) - zero;
  }
}

}  // namespace qfx::cuda
