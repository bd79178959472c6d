#include "cpu/kernels/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "cpu/kernels/selfcheck.h"

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

const Kernels& kernels_of(Isa isa) {
  switch (isa) {
#define QFX_ISA(isa, name) \
  case Isa::isa:           \
    return kernels_##name();
#include "cpu/core/isas.inc"
#undef QFX_ISA
    default:
      throw std::logic_error("no kernels are compiled for this instruction set");
  }
}

const std::vector<Isa>& usable_isas() { return checked().usable; }

const std::vector<std::string>& faults() { return checked().faults; }

Isa current_isa() { return current().load(std::memory_order_relaxed); }

void set_isa(const std::string& name) { current().store(parse(name)); }

}  // namespace qfx::cpu
