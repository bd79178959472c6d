// What masks hide from rows of queries, quad by quad. (A1)
#include <algorithm>
#include <bit>

#include "cpu/attention/cache_rows.h"

namespace qfx::cpu {
namespace {

// Whether a row sees any key of a quad, and whether its mask changes a score.
QuadMask mask_of_quad(const float* added) {
  constexpr uint32_t kBits = std::bit_cast<uint32_t>(kHiddenScore);
  uint32_t any = 0, changed = 0;
  for (int n = 0; n < kQuad; ++n) {
    const uint32_t bits = std::bit_cast<uint32_t>(added[n]);
    any |= bits ^ kBits;
    changed |= bits;
  }
  return changed == 0 ? QuadMask::kZeros : any == 0 ? QuadMask::kHidden : QuadMask::kSome;
}

}  // namespace

// Each row's mask, one for all that have the same, with minus infinity after the last key. Heads
// that follow mostly have those of the head before.
void CacheRows::look() {
  int64_t slot = -1;
  bool changed = false;
  for (int64_t r = 0; r < count_; ++r) {
    const Query at = query(r);
    Mask mask = a_.mask;
    mask.data += at.b * a_.mask_strides[0] + at.h * a_.mask_strides[1];
    const char* row = mask.row(at.t);
    if (slot < 0 || row != loaded_[slot]) {
      if (row != loaded_[++slot]) {
        load_slot(mask, at.t, slot);
        loaded_[slot] = row;
        changed = true;
      }
    }
    slot_[r] = slot;
  }
  changed |= slot + 1 != slots_;
  slots_ = slot + 1;
  for (int64_t quad = 0; changed && quad < quads_; ++quad) {
    seen_[quad] = 0;
    for (int64_t s = 0; s < slots_ && seen_[quad] == 0; ++s) {
      seen_[quad] = kinds_[s * quads_ + quad] != QuadMask::kHidden;
    }
  }
}

void CacheRows::load_slot(const Mask& mask, int64_t t, int64_t slot) {
  const int64_t width = quads_ * kQuad;
  float* to = masks_ + slot * width;
  load_mask(kernels_, mask, t, a_.length, to);
  std::fill(to + a_.length, to + width, kHiddenScore);
  for (int64_t quad = 0; quad < quads_; ++quad) {
    kinds_[slot * quads_ + quad] = mask_of_quad(to + quad * kQuad);
  }
}

// What is added to the scores of row r with a quad, or null.
const float* CacheRows::added(int64_t r, int64_t quad) const {
  if (a_.mask.kind == Mask::Kind::kNone) return (quad + 1) * kQuad > a_.length ? masks_ : nullptr;
  const int64_t at = slot_[r] * quads_ + quad;
  return kinds_[at] == QuadMask::kZeros ? nullptr : masks_ + at * kQuad;
}

// Quads of a part outside of which no row sees a key.
CacheRows::Quads CacheRows::seen_in(int64_t part) const {
  Quads quads = {part * kQuadsOfPart, std::min((part + 1) * kQuadsOfPart, quads_)};
  while (quads.first < quads.end && seen_[quads.first] == 0) ++quads.first;
  while (quads.first < quads.end && seen_[quads.end - 1] == 0) --quads.end;
  return {quads.first - part * kQuadsOfPart, quads.end - part * kQuadsOfPart};
}

}  // namespace qfx::cpu
