#include "cpu/conv/window_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 8;  // of quantizing and arranging, in parallel.h's unit
constexpr int64_t kSegment = 32;         // elements that are worth a call each

uint64_t next_number() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

int64_t segment_of(const Windows& of) {
  return of.channels * (of.w.dilation == 1 ? of.w.kernel : 1);
}

// Whether the blocks of R lie within pixels, whose segments are then quantized where they are.
bool is_by_pixel(const QuantizedWindows& from) {
  const auto& [factor, rotation] = from.transform;
  const bool fits = rotation == 0 || from.of.channels % rotation == 0;
  return factor == nullptr && fits && segment_of(from.of) >= kSegment;
}

}  // namespace

WindowRows::WindowRows(const Kernels& kernels, const PackedWeight& w, const QuantizedWindows& from,
                       int64_t first, int64_t count, float* scales)
    : RowSource(make_rows(format_for(kernels, operands_of(w, from.spec.bits < 8), count), count, w,
                          rows_memory())),
      kernels_(kernels),
      w_(w),
      from_(from),
      first_(first),
      scales_(scales),
      by_pixel_(is_by_pixel(from)),
      reading_{kernels,   from_.x,      from_.of, by_pixel_ ? from.transform.rotation : 0,
               by_pixel_, next_number()} {}

int64_t WindowRows::work() const { return rows.count * w_.k * kStepsPerElement; }

int64_t WindowRows::part() const { return std::min<int64_t>(from_.of.w.out, 64); }

void WindowRows::fill(int64_t begin, int64_t end) const {
  thread_local Lines lines;
  const int64_t part = reading_.part();
  while (begin < end) {
    const OutputPixel at = output_pixel(from_.of, first_ + begin);
    const int64_t count = std::min({end - begin, from_.of.w.out - at.w, part});
    lines.prepare(reading_, at, {at.w, at.w + count});
    fill_line(lines, begin, at.w, count);
    begin += count;
  }
}

void WindowRows::fill_line(Lines& lines, int64_t m, int64_t w, int64_t count) const {
  thread_local Scratch scratch;
  const bool in_place = rows.format->bytes_per_code == 1;
  int8_t* apart = in_place ? nullptr : scratch.get<int8_t>(kWindowsAtOnce * w_.k);
  const int64_t stride = in_place ? rows.stride : w_.k;
  int32_t zero[kWindowsAtOnce];
  for (int64_t i = 0; i < count; i += kWindowsAtOnce) {
    const int64_t some = std::min<int64_t>(kWindowsAtOnce, count - i), row = m + i;
    int8_t* q = in_place ? reinterpret_cast<int8_t*>(rows.a + row * stride) : apart;
    const WindowReads reads = lines.windows(w + i);
    const WindowCodes to = {q, stride, scales_ + row, zero};
    if (by_pixel_) {
      kernels_.row->windows->quantize(&reads, some, &from_.spec, &to);
    } else {
      quantize_gathered(reads, some, to);
    }
    arrange_rows(w_, q, stride, zero, {row, row + some}, rows);
  }
}

void WindowRows::quantize_gathered(const WindowReads& reads, int64_t count,
                                   const WindowCodes& to) const {
  thread_local Scratch scratch;
  float* gathered = scratch.get<float>(kRowsAtOnce * w_.k);
  RowCode codes[kRowsAtOnce];
  for (int64_t first = 0; first < count; first += kRowsAtOnce) {
    const int64_t some = std::min<int64_t>(kRowsAtOnce, count - first);
    float* at = gathered;
    for (int64_t r = first; r < first + some; ++r) {
      for (int64_t i = 0; i < reads.pieces; ++i, at += reads.length) {
        std::memcpy(at, reads.from[i] + r * reads.step, reads.length * sizeof(float));
      }
    }
    const FloatMatrix windows = {gathered, Dtype::kFloat32, some, w_.k, w_.k, from_.transform};
    quantize_rows(kernels_, windows, from_.spec, nullptr, 0, some, codes, to.q + first * to.stride,
                  to.stride);
    for (int64_t r = 0; r < some; ++r) {
      to.scale[first + r] = codes[r].scale;
      to.zero_point[first + r] = codes[r].zero_point;
    }
  }
}

}  // namespace qfx::cpu
