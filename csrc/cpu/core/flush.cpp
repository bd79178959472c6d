#include "cpu/core/flush.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace qfx::cpu {
namespace {

constexpr int64_t kLine = 64;  // bytes

#if defined(__x86_64__)
bool has_clflushopt() {
  constexpr unsigned kClflushopt = 1u << 23;
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & kClflushopt) != 0;
}

// Lines at once, where clflush takes one after another: 5 against 70 to 190 ns a line.
__attribute__((target("clflushopt"))) void flush_at_once(const int8_t* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) {
    _mm_clflushopt(const_cast<int8_t*>(data + at));
  }
}
#endif

}  // namespace

void flush(const int8_t* data, int64_t bytes) {
#if defined(__x86_64__)
  static const bool at_once = has_clflushopt();
  if (at_once) {
    flush_at_once(data, bytes);
  } else {
    for (int64_t at = 0; at < bytes; at += kLine) _mm_clflush(data + at);
  }
  _mm_mfence();
#elif defined(__aarch64__) && defined(__linux__)  // which lets programs do so
  for (int64_t at = 0; at < bytes; at += kLine) {
    asm volatile("dc civac, %0" ::"r"(data + at) : "memory");
  }
  asm volatile("dsb ish" ::: "memory");
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}

}  // namespace qfx::cpu
