// The kernels of this name, with the instructions of avxvnniint8.h in the place of the processor's.
#include "avxvnniint8.h"

#include "cpu/kernels/x86/avxvnniint8.cpp"
