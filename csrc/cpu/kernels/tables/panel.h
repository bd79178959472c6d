// The shape of packed weights, which every format of operands reads.
#pragma once

namespace qfx::cpu {

inline constexpr int kPanel = 32;      // columns of a weight panel
inline constexpr int kGroup = 4;       // consecutive k of one column that lie side by side
inline constexpr int kKMultiple = 64;  // K of a packed weight is padded to this

}  // namespace qfx::cpu
