#include "cpu/core/isa.h"

#include <stdexcept>

namespace qfx::cpu {

const char* name_of(Isa isa) {
  switch (isa) {
#define QFX_ISA(isa, name) \
  case Isa::isa:           \
    return #name;
#include "cpu/core/isas.inc"
#undef QFX_ISA
    default:
      throw std::logic_error("an instruction set that this library was not compiled with");
  }
}

std::vector<Isa> compiled_isas() {
  return {
#define QFX_ISA(isa, name) Isa::isa,
#include "cpu/core/isas.inc"
#undef QFX_ISA
  };
}

}  // namespace qfx::cpu
