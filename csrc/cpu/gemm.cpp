#include "cpu/gemm.h"

#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kBlockRows = 240;  // in tiles of 3 to 6, 12 or 30; their codes stay in L2
constexpr int64_t kArrangedBytes = 16 << 20;
constexpr int64_t kBlockK = 512;  // a panel block of 32 x 512 bytes stays in L1

struct Task {
  int64_t row_begin, row_end, panel_begin, panel_end;
};

// Row blocks x groups of panels, enough of them for the threads to share evenly.
class Tasks {
 public:
  Tasks(int64_t rows, int64_t panels, int64_t threads)
      : rows_(rows), panels_(panels), row_blocks_((rows + kBlockRows - 1) / kBlockRows) {
    const int64_t wanted = threads == 1 ? 1 : (4 * threads + row_blocks_ - 1) / row_blocks_;
    groups_ = std::clamp<int64_t>(wanted, 1, panels);
  }

  int64_t size() const { return row_blocks_ * groups_; }

  Task operator[](int64_t i) const {
    const int64_t block = i / groups_, group = i % groups_;
    return {block * kBlockRows, std::min(rows_, (block + 1) * kBlockRows),
            group * panels_ / groups_, (group + 1) * panels_ / groups_};
  }

 private:
  int64_t rows_, panels_, row_blocks_, groups_;
};

// Rows of a tile: as tall as the kernels allow, and all of about the same height.
int64_t tile_height(int64_t rows, int64_t tallest) {
  const int64_t tiles = (rows + tallest - 1) / tallest;
  return (rows + tiles - 1) / tiles;
}

void run_panel(const Rows& rows, const PackedWeight& w, const Task& task, int64_t p, int32_t* sums,
               const TileSink& sink) {
  const Format& format = *rows.format;
  Panel panel;
  sink.load_panel(p, &panel);
  const int64_t depth = round_up(w.k, format.k_multiple);
  const int64_t count = task.row_end - task.row_begin;
  const int64_t height = tile_height(count, format.tile_rows);
  // One tile of each block prefetches the next: the second, as the first may wait for its own.
  const int64_t fetching = task.row_begin + (count > height ? height : 0);
  const int64_t block = count <= 2 ? std::max(depth, kBlockK) : kBlockK;
  for (int64_t k = 0; k == 0 || k < depth; k += block) {
    const int64_t groups = std::min(block, depth - k) / kGroup;
    const int8_t* b = w.panel(p) + k * kPanel;
    const bool last = k + block >= depth;
    const int8_t* ahead = b + (count <= 2 ? kAhead : groups * kGroup * kPanel);
    for (int64_t m = task.row_begin; m < task.row_end; m += height) {
      const int height_here = static_cast<int>(std::min(height, task.row_end - m));
      const bool fetch = m == fetching;
      const TileFn* tiles = fetch ? format.prefetching_tiles : format.tiles;
      const uint8_t* a = rows.a + m * rows.stride + k * format.bytes_per_code;
      int32_t* tile = sums + (m - task.row_begin) * kPanel;
      tiles[height_here - 1](a, rows.stride, b, groups, ahead, tile, k > 0);
      if (last) sink.tile(tile, m, height_here, p, panel);
    }
  }
}

void run_task(const Rows& rows, const PackedWeight& w, const Task& task, const TileSink& sink) {
  thread_local Scratch scratch;
  int32_t* sums = scratch.get<int32_t>(kBlockRows * kPanel);
  for (int64_t p = task.panel_begin; p < task.panel_end; ++p) {
    run_panel(rows, w, task, p, sums, sink);
  }
  release(*rows.format);
}

// An odd number of cache lines, or the rows of a tile would share cache sets.
int64_t row_stride(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

}  // namespace

const Format& format_for(const Kernels& kernels, Operands operands, int64_t rows) {
  const Format* format = kernels.formats[static_cast<int>(operands)];
  while (rows < format->minimum_rows) format = format->below;
  return *format;
}

int64_t tile_rows_for(const Format& format, int64_t rows) {
  return tile_height(std::clamp<int64_t>(rows, 1, kBlockRows), format.tile_rows);
}

int64_t rows_at_once(const PackedWeight& w) {
  const int64_t row_bytes = row_stride(w.padded_k * kMaxBytesPerCode);
  return std::max<int64_t>(kArrangedBytes / row_bytes / kBlockRows, 1) * kBlockRows;
}

Rows make_rows(const Format& format, int64_t count, const PackedWeight& w) {
  thread_local RowsMemory memory;
  return make_rows(format, count, w, memory);
}

Rows make_rows(const Format& format, int64_t count, const PackedWeight& w, RowsMemory& memory) {
  const int64_t stride = row_stride(round_up(w.k, format.k_multiple) * format.bytes_per_code);
  int32_t* add = memory.constants.get<int32_t>(2 * count);
  return {&format, memory.codes.get<uint8_t>(count * stride), count, stride, add, add + count};
}

void arrange_row(const PackedWeight& w, const int8_t* q, int32_t zero_point, int64_t m,
                 const Rows& rows) {
  const Format& format = *rows.format;
  const int64_t depth = round_up(w.k, format.k_multiple);
  rows.add[m] = format.arrange(q, w.k, depth, rows.a + m * rows.stride);
  rows.mul[m] = static_cast<int32_t>(static_cast<uint32_t>(zero_point) +
                                     static_cast<uint32_t>(format.mul_offset));
}

void gemm(const Rows& rows, const PackedWeight& w, const TileSink& sink) {
  if (rows.count == 0 || w.n == 0) return;
  const int64_t work = rows.count * w.n * std::max<int64_t>(w.k, 1);
  const bool serial = work < kSerialWork;
  const Tasks tasks(rows.count, w.panels(), serial ? 1 : thread_count());
  parallel(tasks.size(), work, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run_task(rows, w, tasks[i], sink);
  });
}

}  // namespace qfx::cpu
