#include "cpu/dispatch.h"

#include <stdexcept>

namespace qfx::cpu {

const Kernels& kernels_of(Isa isa) {
  switch (isa) {
#define QFX_KERNELS(isa, name) \
  case Isa::isa:               \
    return kernels_##name();
#include "cpu/kernels.inc"
#undef QFX_KERNELS
    default:
      throw std::logic_error("no kernels are compiled for this instruction set");
  }
}

}  // namespace qfx::cpu
