// In the place of libtorch_cpu.so where this compiles for another processor: what it exports of the
// C++ library of GCC 11 and 12. So libqfx takes these from PyTorch there too, and not from a system
// that may be older.
#define QFX_EXPORTED(name) \
  extern "C" void name() {}
QFX_EXPORTED(_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev)
QFX_EXPORTED(_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev)
QFX_EXPORTED(_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv)
QFX_EXPORTED(_ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv)
