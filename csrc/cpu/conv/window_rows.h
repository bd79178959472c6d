// The windows of an image, quantized while they are read: rows for the integer GEMM.
#pragma once

#include "cpu/conv/lines.h"
#include "cpu/gemm/product.h"

namespace qfx::cpu {

struct QuantizedWindows {
  const Image& x;
  const Windows& of;
  CodeSpec spec;
  Transform transform;
};

// Windows first, first + 1, ... Each has a code of its own, whose scale goes to scales[m].
class WindowRows final : public RowSource {
 public:
  WindowRows(const Kernels& kernels, const PackedWeight& w, const QuantizedWindows& from,
             int64_t first, int64_t count, float* scales);

  void fill(int64_t begin, int64_t end) const override;
  int64_t work() const override;
  int64_t part() const override;

 private:
  void fill_line(Lines& lines, int64_t m, int64_t w, int64_t count) const;
  void quantize_gathered(const WindowReads& reads, int64_t count, const WindowCodes& to) const;

  const Kernels& kernels_;
  const PackedWeight& w_;
  const QuantizedWindows from_;
  const int64_t first_;
  float* const scales_;
  const bool by_pixel_;  // pixels are rotated, and not windows
  const LineReading reading_;
};

}  // namespace qfx::cpu
