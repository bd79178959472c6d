// Half: the compiler's own type of IEEE half precision, whose conversions to float are exact.
#pragma once

namespace qfx {

#if defined(__aarch64__)
using Half = __fp16;  // GCC 12 knows no _Float16 there
#else
using Half = _Float16;
#endif

}  // namespace qfx
