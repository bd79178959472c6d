// Who made this processor: what defaults of speed depend on, and no result.
#pragma once

namespace qfx::cpu {

// AMD's own, and Hygon's, which are made from them.
bool made_by_amd();

}  // namespace qfx::cpu
