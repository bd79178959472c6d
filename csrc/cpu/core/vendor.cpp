#include "cpu/core/vendor.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstring>
#endif

namespace qfx::cpu {

#if defined(__x86_64__)
bool made_by_amd() {
  static const bool amd = [] {
    unsigned highest, name[3];
    if (!__get_cpuid(0, &highest, &name[0], &name[2], &name[1])) return false;
    return std::memcmp(name, "AuthenticAMD", 12) == 0 || std::memcmp(name, "HygonGenuine", 12) == 0;
  }();
  return amd;
}
#else
bool made_by_amd() { return false; }
#endif

}  // namespace qfx::cpu
