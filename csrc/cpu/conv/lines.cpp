#include "cpu/conv/lines.h"

#include <algorithm>
#include <cstring>

namespace qfx::cpu {
namespace {

// Lines are kept between outputs where so much holds those of a window.
constexpr int64_t kKeptBytes = 1 << 20;
constexpr int64_t kPart = 128;  // outputs of a longer line that are read at a time

constexpr int64_t kLongPiece = 64;  // floats that every instruction set reads well in one piece
constexpr int32_t kZeroMost = 0, kZeroDepth = ~0;  // the range of zeros

// Inputs from the first to the last one of `count` outputs.
int64_t reach_of(const WindowAxis& axis, int64_t count) {
  return (count - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1;
}

// Lines that lie between the first and the last one of a window.
int64_t lines_of(const Windows& of) { return (of.h.kernel - 1) * of.h.dilation + 1; }

constexpr int64_t kTile = 16;          // channels and columns that are transposed at a time
constexpr int64_t kAhead = 4 * kTile;  // columns on, which are fetched meanwhile

// Transposes a tile of kTile channels, `channel` apart, whose columns follow each other.
template <typename Element>
void interleave_tile(const Element* from, int64_t channel, int64_t channels, Element* to) {
  Element tile[kTile][kTile];
  for (int64_t c = 0; c < kTile; ++c) {
    __builtin_prefetch(from + c * channel + kAhead);
    std::memcpy(tile[c], from + c * channel, sizeof(tile[c]));
  }
  for (int64_t w = 0; w < kTile; ++w) {
    Element pixel[kTile];
    for (int64_t c = 0; c < kTile; ++c) pixel[c] = tile[c][w];
    std::memcpy(to + w * channels, pixel, sizeof(pixel));
  }
}

// Transposes channels [C][columns], `channel` and `column` apart, to [columns][C].
template <typename Element>
void interleave(const Element* from, int64_t channel, int64_t column, int64_t channels,
                int64_t columns, Element* to) {
  for (int64_t at = 0; at < columns; at += kTile) {
    const int64_t first = std::max<int64_t>(std::min(at, columns - kTile), 0);  // the last overlaps
    const int64_t last = std::min(first + kTile, columns);
    int64_t c = 0;
    for (; column == 1 && last - first == kTile && c + kTile <= channels; c += kTile) {
      interleave_tile(from + c * channel + first, channel, channels, to + first * channels + c);
    }
    for (; c < channels; ++c) {
      const Element* line = from + c * channel;
      for (int64_t w = first; w < last; ++w) to[w * channels + c] = line[w * column];
    }
  }
}

}  // namespace

int64_t LineReading::part() const {
  const int64_t line = reach_of(of.w, of.w.out) * of.channels * sizeof(float);
  return line * of.d.kernel * lines_of(of) <= kKeptBytes ? of.w.out : std::min(kPart, of.w.out);
}

void Lines::prepare(const LineReading& from, const OutputPixel& at, const LinePart& given) {
  const Windows& of = from.of;
  const bool whole = from.part() == of.w.out;
  const LinePart part = whole ? LinePart{0, of.w.out} : given;
  lay_out(from, part);
  const int64_t slots = lines_of(of);
  for (int64_t i = 0; i < of.d.kernel * of.h.kernel; ++i) {
    const int64_t tap_d = i / of.h.kernel;
    const int64_t d = of.d.input(at.d, tap_d), h = of.h.input(at.h, i % of.h.kernel);
    const int64_t slot = tap_d * slots + (h + slots * of.h.before) % slots;
    const Key key = {from.number, at.b, d, h, part.begin, part.end};
    if (keys_[slot] != key) {
      fill(from, key, slot);
      keys_[slot] = key;
    }
    slot_of_[i] = slot;
  }
}

void Lines::lay_out(const LineReading& from, const LinePart& part) {
  const Windows& of = from.of;
  if (number_ == from.number && part_.end - part_.begin == part.end - part.begin) {
    part_ = part;
    return;
  }
  const int64_t slots = of.d.kernel * lines_of(of), outputs = part.end - part.begin;
  number_ = from.number;
  part_ = part;
  channels_ = of.channels;
  columns_ = reach_of(of.w, outputs);
  floats_of_line_ = columns_ * of.channels;
  room_ = outputs + kWindowsAtOnce;
  floats_ = memory_.get<float>(slots * floats_of_line_);
  reached_ = reached_ranges_.get<int32_t>(2 * slots * room_);
  keys_.assign(slots, Key{});
  const int64_t taps = of.d.kernel * of.h.kernel;
  slot_of_.assign(taps, 0);
  most_.assign(taps, nullptr);
  depth_.assign(taps, nullptr);
  const bool dense = of.w.dilation == 1;
  const int64_t run = of.channels * (dense ? of.w.kernel : 1);
  const int64_t length = run % kLongPiece != 0 && run % kPiece == 0 ? kPiece : run;
  runs_ = dense ? 1 : of.w.kernel;
  apart_ = of.channels * of.w.dilation;
  pieces_.assign(taps * runs_ * (run / length), nullptr);
  reads_ = {taps * runs_ * (run / length),
            length,
            of.w.stride * of.channels,
            taps,
            pieces_.data(),
            most_.data(),
            depth_.data()};
}

RangeColumns Lines::reached_by(int64_t slot) const {
  int32_t* most = reached_ + 2 * slot * room_;
  return {most, most + room_};
}

WindowReads Lines::windows(int64_t w) {
  const int64_t at = w - part_.begin, lines = reads_.lines;
  const int64_t of_run = reads_.pieces / (lines * runs_);
  const float** piece = pieces_.data();
  for (int64_t i = 0; i < lines; ++i) {
    const RangeColumns reached = reached_by(slot_of_[i]);
    most_[i] = reached.most + at;
    depth_[i] = reached.depth + at;
    const float* run = floats_ + slot_of_[i] * floats_of_line_ + at * reads_.step;
    for (int64_t j = 0; j < runs_; ++j, run += apart_) {
      for (int64_t k = 0; k < of_run; ++k) *piece++ = run + k * reads_.length;
    }
  }
  return reads_;
}

void Lines::fill(const LineReading& from, const Key& key, int64_t slot) {
  const Windows& of = from.of;
  float* to = floats_ + slot * floats_of_line_;
  const RangeColumns reached = reached_by(slot);
  const int64_t outputs = part_.end - part_.begin, first = of.w.input(part_.begin, 0);
  const int64_t begin = std::clamp<int64_t>(-first, 0, columns_);
  const int64_t end = std::clamp<int64_t>(of.w.size - first, begin, columns_);
  if (!of.d.inside(key.d) || !of.h.inside(key.h)) {
    std::fill_n(to, floats_of_line_, 0.f);
    std::fill_n(reached.most, outputs, kZeroMost);
    std::fill_n(reached.depth, outputs, kZeroDepth);
    return;
  }
  std::fill_n(to, begin * channels_, 0.f);
  std::fill_n(to + end * channels_, (columns_ - end) * channels_, 0.f);
  Key inside = key;
  inside.begin = first + begin;
  inside.end = first + end;
  float* pixels = to + begin * channels_;
  if (!from.ranges) return fill_pixels(from, inside, pixels);
  const PixelRow row = {pixels_of(from, inside, pixels), end - begin, channels_, from.rotation};
  find_ranges(from, row, begin, pixels, reached);
}

// Columns [key.begin, key.end) of a line that lies in the image: where they are, or `to`.
const float* Lines::pixels_of(const LineReading& from, const Key& key, float* to) {
  const Image& x = from.x;
  if (x.dtype == Dtype::kFloat32 && x.c == 1 && x.w == channels_) {
    return reinterpret_cast<const float*>(x.at(key.b, key.d, key.h, key.begin));
  }
  fill_pixels(from, key, to);
  return to;
}

void Lines::fill_pixels(const LineReading& from, const Key& key, float* to) {
  const Image& x = from.x;
  const int64_t count = key.end - key.begin;
  const char* source = x.at(key.b, key.d, key.h, key.begin);
  const bool floats = x.dtype == Dtype::kFloat32;
  if (x.c == 1 || channels_ == 1) {
    for (int64_t w = 0; w < count; ++w) {
      const char* pixel = source + w * x.w * x.element();
      if (floats) {
        std::memcpy(to + w * channels_, pixel, channels_ * sizeof(float));
      } else {
        from.kernels.row->widen(pixel, x.dtype, channels_, to + w * channels_);
      }
    }
    return;
  }
  if (floats) {
    return interleave(reinterpret_cast<const float*>(source), x.c, x.w, channels_, count, to);
  }
  auto* raw = raw_.get<uint16_t>(count * channels_);
  interleave(reinterpret_cast<const uint16_t*>(source), x.c, x.w, channels_, count, raw);
  from.kernels.row->widen(raw, x.dtype, count * channels_, to);
}

// Rotates the pixels from column `begin` on that lie in the image, and finds what windows reach.
void Lines::find_ranges(const LineReading& from, const PixelRow& inside, int64_t begin, float* to,
                        const RangeColumns& reached) {
  const WindowKernels& kernels = *from.kernels.row->windows;
  const WindowAxis& w = from.of.w;
  int32_t* most = pixel_ranges_.get<int32_t>(2 * columns_);
  int32_t* depth = most + columns_;
  std::fill_n(most, columns_, kZeroMost);
  std::fill_n(depth, columns_, kZeroDepth);
  const RangeColumns found = {most + begin, depth + begin};
  kernels.rotate_pixels(&inside, to, &found);
  const int64_t outputs = part_.end - part_.begin;
  kernels.reach(most, outputs, w.stride, w.kernel, w.dilation, reached.most);
  kernels.reach(depth, outputs, w.stride, w.kernel, w.dilation, reached.depth);
}

}  // namespace qfx::cpu
