// Which tiles a product is cut into, and how K is split where its tiles are too few for the GPU. A
// pure function of sizes. Splits are exact: the parts are int32 sums.
#pragma once

#include <algorithm>
#include <cstdint>

namespace qfx::cuda {

inline constexpr int kStepBytes = 64;  // of K that a tile multiplies between two barriers

enum class TileShape : int { k16x64, k64x64, k128x128 };

struct TileSize {
  int m, n;
};

constexpr TileSize size_of(TileShape shape) {
  if (shape == TileShape::k128x128) return {128, 128};
  return {shape == TileShape::k16x64 ? 16 : 64, 64};
}

struct Sizes {
  int64_t batch, m, n, k_bytes;  // of a row of each operand
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t tiles_of(const Sizes& s, TileShape shape) {
  return s.batch * ceil_div(s.m, size_of(shape).m) * ceil_div(s.n, size_of(shape).n);
}

// The tiles of one matrix of the batch.
struct TileGrid {
  unsigned down, across;
};

constexpr TileGrid grid_of(const Sizes& s, TileShape shape) {
  return {static_cast<unsigned>(ceil_div(s.m, size_of(shape).m)),
          static_cast<unsigned>(ceil_div(s.n, size_of(shape).n))};
}

constexpr int64_t steps_of(const Sizes& s) { return ceil_div(s.k_bytes, kStepBytes); }

struct GemmPlan {
  TileShape shape;
  int splits;      // blocks that share a tile, each with its own part of K
  int step_count;  // steps of K that each of them takes, the last perhaps fewer

  friend bool operator==(const GemmPlan&, const GemmPlan&) = default;
};

// Large tiles read the operands least often, so they are taken as soon as they fill the GPU. A part
// of K has kLeastSteps at least, so that its sums are worth their way through memory.
constexpr GemmPlan plan_of(const Sizes& s, int multiprocessors) {
  constexpr int64_t kLeastSteps = 8, kMostSplits = 32;
  TileShape shape = TileShape::k64x64;
  if (s.m <= 16) shape = TileShape::k16x64;
  if (s.m > 64 && tiles_of(s, TileShape::k128x128) >= multiprocessors) shape = TileShape::k128x128;
  const int64_t steps = steps_of(s);
  const int64_t tiles = std::max<int64_t>(tiles_of(s, shape), 1);
  const int64_t wanted = std::min({multiprocessors / tiles, steps / kLeastSteps, kMostSplits});
  const int64_t count = ceil_div(steps, std::max<int64_t>(wanted, 1));
  const int64_t splits = count == 0 ? 1 : ceil_div(steps, count);
  return {shape, static_cast<int>(splits), static_cast<int>(count)};
}

}  // namespace qfx::cuda
