// Lines of an image as windows read them: in float32, channels last, rotated, with zeros around,
// and how far the numbers in reach of each output range.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/conv/geometry.h"
#include "cpu/core/scratch.h"
#include "cpu/kernels/tables/kernels.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/kernels/tables/windows.h"

namespace qfx::cpu {

// Outputs [begin, end) of a line.
struct LinePart {
  int64_t begin, end;
};

// What is read of an image, and how.
struct LineReading {
  const Kernels& kernels;
  const Image& x;
  const Windows& of;
  int rotation;     // of the channels of each pixel; 0 for none
  bool ranges;      // whether they are asked for
  uint64_t number;  // which no other reading has

  // Outputs of a line that are read at a time: all where the lines of a window stay in a cache.
  int64_t part() const;
};

// The lines that the outputs of a line read, of which those that the line before has read are kept.
class Lines {
 public:
  // Makes the lines ready that this part of the output line at.d, at.h of image at.b reads.
  void prepare(const LineReading& from, const OutputPixel& at, const LinePart& part);

  // How outputs w, w + 1, ... read these lines, until the next call.
  WindowReads windows(int64_t w);

 private:
  struct Key {
    uint64_t number;
    int64_t b, d, h, begin, end;
    bool operator==(const Key&) const = default;
  };

  void lay_out(const LineReading& from, const LinePart& part);
  void fill(const LineReading& from, const Key& key, int64_t slot);
  const float* pixels_of(const LineReading& from, const Key& key, float* to);
  void fill_pixels(const LineReading& from, const Key& key, float* to);
  void find_ranges(const LineReading& from, const PixelRow& inside, int64_t begin, float* to,
                   const RangeColumns& reached);
  RangeColumns reached_by(int64_t slot) const;

  Scratch memory_, pixel_ranges_, reached_ranges_, raw_;
  std::vector<Key> keys_;         // of the slots
  std::vector<int64_t> slot_of_;  // of each tap (d, h)
  LinePart part_ = {0, 0};
  float* floats_ = nullptr;
  int32_t* reached_ = nullptr;  // of each slot, RangeColumns of room_ numbers each
  uint64_t number_ = 0;
  int64_t columns_ = 0, floats_of_line_ = 0, channels_ = 0, room_ = 0;
  WindowReads reads_ = {};
  int64_t runs_ = 0, apart_ = 0;      // of what is read of a line; floats from one to the next
  std::vector<const float*> pieces_;  // as reads_ has them
  std::vector<const int32_t*> most_, depth_;
};

}  // namespace qfx::cpu
