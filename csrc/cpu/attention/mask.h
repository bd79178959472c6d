// The masks of attention: what a row may see, which nothing but the mask decides. (A1)
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels/tables/kernels.h"

namespace qfx::cpu {

// What is added to the scores, [M, N] with any strides: nothing, floats, or whether a key counts.
struct Mask {
  enum class Kind { kNone, kFloat, kBool } kind = Kind::kNone;
  const char* data = nullptr;
  int64_t row_stride = 0, column_stride = 0;  // in bytes

  const char* row(int64_t m) const { return data + m * row_stride; }
};

// An axis of a mask, its stride in bytes.
struct MaskAxis {
  int64_t size, stride;
};

// Whether a mask of this kind leaves every score as it is: all keys count, or zeros are added.
// Reads each element once, up to the first that does not.
bool changes_nothing(Mask::Kind kind, const char* data, std::vector<MaskAxis> axes);

// Row m of a mask for the first `keys` keys in float32: what is added, and minus infinity for a key
// that the row does not see.
void load_mask(const Kernels& kernels, const Mask& mask, int64_t m, int64_t keys, float* out);

// Panels of 32 keys: first, first + 1, ... up to `end`.
struct PanelRange {
  int64_t first, end;
};

// Those outside of which the row with this loaded mask sees nothing; none where it sees nothing.
PanelRange panels_seen(const float* added, int64_t keys);

// Whether all rows of a mask see the same keys, and at least one; then seen[n] says which.
bool all_see_the_same(const Kernels& kernels, const Mask& mask, int64_t rows, int64_t keys,
                      uint8_t* seen);

}  // namespace qfx::cpu
