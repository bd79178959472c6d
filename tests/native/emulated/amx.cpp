// The kernels of this name, with the instructions of amx.h in the place of the processor's.
#include "amx.h"

#include "cpu/kernels/x86/amx.cpp"
