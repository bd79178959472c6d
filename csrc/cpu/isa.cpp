#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "cpu/dispatch.h"
#include "cpu/selfcheck.h"

namespace qfx::cpu {
namespace {

Isa parse(const std::string& name) {
  std::string names;
  for (Isa isa : usable_isas()) {
    if (name == name_of(isa)) return isa;
    names += names.empty() ? "" : ", ";
    names += name_of(isa);
  }
  throw std::invalid_argument(
      "instruction set '" + name +
      "' is unknown or not supported by this processor, which has: " + names);
}

struct Checked {
  std::vector<Isa> usable;
  std::vector<std::string> faults;
};

const Checked& checked() {
  static const Checked found = [] {
    Checked result;
    for (Isa isa : compiled_isas()) {
      if (!supported(isa)) continue;
      const std::string fault = isa == Isa::kRef ? "" : fault_of(kernels_of(isa));
      if (fault.empty()) {
        result.usable.push_back(isa);
      } else {
        result.faults.push_back("qfx does not use the instruction set " +
                                std::string(name_of(isa)) + ": " + fault + "; please report this");
      }
    }
    return result;
  }();
  return found;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa = [] {
    const char* forced = std::getenv("QFX_CPU_ISA");
    return forced != nullptr && *forced != '\0' ? parse(forced) : usable_isas().front();
  }();
  return isa;
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvxVnni:
      return "avxvnni";
    case Isa::kAvx512Vnni:
      return "avx512vnni";
    case Isa::kRef:
      break;
  }
  return "ref";
}

std::vector<Isa> compiled_isas() {
#if defined(__x86_64__)
  return {Isa::kAvx512Vnni, Isa::kAvxVnni, Isa::kAvx2, Isa::kRef};
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
  if (isa == Isa::kAvxVnni) return avx2 && __builtin_cpu_supports("avxvnni");
  if (isa == Isa::kAvx512Vnni) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
  }
#endif
  return isa == Isa::kRef;
}

const std::vector<Isa>& usable_isas() { return checked().usable; }

const std::vector<std::string>& faults() { return checked().faults; }

Isa current_isa() { return current().load(std::memory_order_relaxed); }

void set_isa(const std::string& name) { current().store(parse(name)); }

}  // namespace qfx::cpu
