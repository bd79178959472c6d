// Lets a library that was linked on a newer system run with glibc from 2.28 and libstdc++ from GCC
// 8 on: what they lack, and compilers call, is defined here for the library itself.
#include <new>

extern "C" {
// Of glibc 2.32, read by the shared pointers in PyTorch's headers, whose counts are not atomic
// while the process has a single thread. Here it says that there may be others.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

#if defined(__GLIBCXX__)
namespace std {
// Of GCC 11, called by containers that would become larger than the address space.
void __throw_bad_array_new_length() { throw bad_alloc(); }
}  // namespace std
#endif
