#include "cpu/conv/window_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "cpu/kernels/tables/code.h"

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

void WindowRows::fill_line(const Lines& lines, int64_t m, int64_t w, int64_t count) const {
  thread_local Scratch scratch;
  const bool in_place = rows.format->bytes_per_code == 1;
  int8_t* apart = in_place ? nullptr : scratch.get<int8_t>(kRowsAtOnce * w_.k);
  const int64_t stride = in_place ? rows.stride : w_.k;
  RowCode codes[kRowsAtOnce];
  for (int64_t i = 0; i < count; i += kRowsAtOnce) {
    const int64_t some = std::min<int64_t>(kRowsAtOnce, count - i);
    int8_t* q = in_place ? reinterpret_cast<int8_t*>(rows.a + (m + i) * stride) : apart;
    if (by_pixel_) {
      quantize(lines, w + i, some, codes, q, stride);
    } else {
      quantize_gathered(lines, w + i, some, codes, q, stride);
    }
    for (int64_t r = 0; r < some; ++r) {
      arrange_row(w_, q + r * stride, codes[r].zero_point, m + i + r, rows);
      scales_[m + i + r] = codes[r].scale;
    }
  }
}

void WindowRows::quantize(const Lines& lines, int64_t w, int64_t count, RowCode* codes, int8_t* q,
                          int64_t stride) const {
  const int64_t segment = segment_of(from_.of), channels = from_.of.channels;
  const int64_t line = channels * from_.of.w.kernel, step = channels * from_.of.w.dilation;
  for (int64_t r = 0; r < count; ++r) {
    ::new (&codes[r]) RowCode(code_of(lines.range(w + r), from_.spec));
  }
  for (int64_t r = 0; r < count; ++r) {
    int8_t* to = q + r * stride;
    for (int64_t i = 0; i < from_.of.d.kernel * from_.of.h.kernel; ++i) {
      const float* pixels = lines.pixels(i, w + r);
      for (int64_t k = 0; k < line; k += segment, to += segment, pixels += step) {
        kernels_.row->quantize(pixels, segment, &codes[r], to);
      }
    }
  }
}

void WindowRows::quantize_gathered(const Lines& lines, int64_t w, int64_t count, RowCode* codes,
                                   int8_t* q, int64_t stride) const {
  thread_local Scratch scratch;
  const int64_t segment = segment_of(from_.of), channels = from_.of.channels;
  const int64_t line = channels * from_.of.w.kernel, step = channels * from_.of.w.dilation;
  float* gathered = scratch.get<float>(kRowsAtOnce * w_.k);
  float* to = gathered;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t i = 0; i < from_.of.d.kernel * from_.of.h.kernel; ++i) {
      const float* pixels = lines.pixels(i, w + r);
      for (int64_t k = 0; k < line; k += segment, to += segment, pixels += step) {
        std::memcpy(to, pixels, segment * sizeof(float));
      }
    }
  }
  const FloatMatrix windows = {gathered, Dtype::kFloat32, count, w_.k, w_.k, from_.transform};
  quantize_rows(kernels_, windows, from_.spec, nullptr, 0, count, codes, q, stride);
}

}  // namespace qfx::cpu
