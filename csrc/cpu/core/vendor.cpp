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

int family() {
  static const int found = [] {  // asking takes long on a virtual machine
    constexpr unsigned kExtended = 15;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const unsigned base = a >> 8 & 15;
    return static_cast<int>(base == kExtended ? base + (a >> 20 & 255) : base);
  }();
  return found;
}
#else
bool made_by_amd() { return false; }
int family() { return 0; }
#endif

}  // namespace qfx::cpu
