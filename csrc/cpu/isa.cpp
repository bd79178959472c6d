#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace qfx::cpu {
namespace {

Isa parse(const std::string& name) {
  std::string names;
  for (Isa isa : supported_isas()) {
    if (name == name_of(isa)) return isa;
    names += names.empty() ? "" : ", ";
    names += name_of(isa);
  }
  throw std::invalid_argument(
      "instruction set '" + name +
      "' is unknown or not supported by this processor, which has: " + names);
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa = [] {
    const char* forced = std::getenv("QFX_CPU_ISA");
    return forced != nullptr && *forced != '\0' ? parse(forced) : supported_isas().front();
  }();
  return isa;
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512Vnni:
      return "avx512vnni";
    case Isa::kRef:
      break;
  }
  return "ref";
}

std::vector<Isa> compiled_isas() {
#if defined(__x86_64__)
  return {Isa::kAvx512Vnni, Isa::kAvx2, Isa::kRef};
#else
  return {Isa::kRef};
#endif
}

bool supported(Isa isa) {
#if defined(__x86_64__)
  // libgcc and compiler-rt also check that the operating system saves the wide registers.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512Vnni) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
  }
#endif
  return isa == Isa::kRef;
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> found;
  for (Isa isa : compiled_isas()) {
    if (supported(isa)) found.push_back(isa);
  }
  return found;
}

Isa current_isa() { return current().load(std::memory_order_relaxed); }

void set_isa(const std::string& name) { current().store(parse(name)); }

}  // namespace qfx::cpu
