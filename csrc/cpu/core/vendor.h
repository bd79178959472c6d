// Who made this processor: what defaults of speed depend on, and no result.
#pragma once

namespace qfx::cpu {

// AMD's own, and Hygon's, which are made from them.
bool made_by_amd();

// As the processor numbers it: of AMD 25 is Zen 3 and 4, 26 is Zen 5. 0 where it has none.
int family();

}  // namespace qfx::cpu
