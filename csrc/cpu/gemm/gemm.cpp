#include "cpu/gemm/gemm.h"

#include <algorithm>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kArrangedBytes = 16 << 20;

struct Task {
  RowBlock block;
  int64_t panel_begin, panel_end;
};

// Row blocks x groups of panels, enough of them for the threads to share evenly.
class Tasks {
 public:
  Tasks(int64_t rows, int64_t panels, int64_t threads)
      : rows_(rows), panels_(panels), row_blocks_((rows + kRowsPerBlock - 1) / kRowsPerBlock) {
    const int64_t wanted = threads == 1 ? 1 : (4 * threads + row_blocks_ - 1) / row_blocks_;
    groups_ = std::clamp<int64_t>(wanted, 1, panels);
  }

  int64_t size() const { return row_blocks_ * groups_; }

  Task operator[](int64_t i) const {
    const int64_t block = i / groups_, group = i % groups_;
    return {{block * kRowsPerBlock, std::min(rows_, (block + 1) * kRowsPerBlock)},
            group * panels_ / groups_,
            (group + 1) * panels_ / groups_};
  }

 private:
  int64_t rows_, panels_, row_blocks_, groups_;
};

void run_panel(const Rows& rows, const PackedWeight& w, const RowBlock& rows_here, int64_t p,
               int32_t* sums, const TileSink& sink) {
  const Format& format = *rows.format;
  Panel panel;
  sink.load_panel(p, &panel);
  const int64_t depth = round_up(w.k, format.k_multiple);
  const int64_t count = rows_here.rows();
  const int64_t height = tile_height(count, format.tile_rows);
  // One tile of each block prefetches the next: the second, as the first may wait for its own.
  const int64_t fetching = rows_here.begin + (count > height ? height : 0);
  const int64_t block = count <= 2 ? std::max(depth, kBlockK) : kBlockK;
  for (int64_t k = 0; k == 0 || k < depth; k += block) {
    const int64_t groups = std::min(block, depth - k) / kGroup;
    const int8_t* b = w.panel(p) + k * kPanel;
    const bool last = k + block >= depth;
    const int8_t* ahead = b + (count <= 2 ? kAhead : groups * kGroup * kPanel);
    for (int64_t m = rows_here.begin; m < rows_here.end; m += height) {
      const int height_here = static_cast<int>(std::min(height, rows_here.end - m));
      const bool fetch = m == fetching;
      const TileFn* tiles = fetch ? format.prefetching_tiles : format.tiles;
      const uint8_t* a = rows.a + m * rows.stride + k * format.bytes_per_code;
      int32_t* tile = sums + (m - rows_here.begin) * kPanel;
      tiles[height_here - 1](a, rows.stride, b, groups, ahead, tile, k > 0);
      if (last) sink.tile(tile, m, height_here, p, panel);
    }
  }
}

// Whole products, handed to a sink.
class Products final : public PanelWork {
 public:
  Products(const Rows& rows, const PackedWeight& w, const TileSink& sink)
      : rows_(rows), w_(w), sink_(sink) {}

  void run(const RowBlock& block, int64_t p) const override {
    thread_local Scratch scratch;
    run_panel(rows_, w_, block, p, scratch.get<int32_t>(kRowsPerBlock * kPanel), sink_);
  }

 private:
  const Rows& rows_;
  const PackedWeight& w_;
  const TileSink& sink_;
};

// An odd number of cache lines, or the rows of a tile would share cache sets.
int64_t row_stride(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

}  // namespace

const Format& format_for(const Kernels& kernels, Operands operands, int64_t rows) {
  const Format* format = kernels.formats[static_cast<int>(operands)];
  while (rows < format->minimum_rows) format = format->below;
  return *format;
}

int64_t tile_height(int64_t rows, int64_t tallest) {
  const int64_t tiles = (rows + tallest - 1) / tallest;
  return (rows + tiles - 1) / tiles;
}

int64_t tile_rows_for(const Format& format, int64_t rows) {
  return tile_height(std::clamp<int64_t>(rows, 1, kRowsPerBlock), format.tile_rows);
}

int64_t rows_at_once(const PackedWeight& w) {
  const int64_t row_bytes = row_stride(w.padded_k * kMaxBytesPerCode);
  return std::max<int64_t>(kArrangedBytes / row_bytes / kRowsPerBlock, 1) * kRowsPerBlock;
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

void for_each_panel(const Rows& rows, const PackedWeight& w, const PanelWork& work) {
  if (rows.count == 0 || w.n == 0) return;
  const int64_t steps = rows.count * w.n * std::max<int64_t>(w.k, 1);
  const Tasks tasks(rows.count, w.panels(), steps < kSerialWork ? 1 : thread_count());
  parallel(tasks.size(), steps, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Task task = tasks[i];
      for (int64_t p = task.panel_begin; p < task.panel_end; ++p) work.run(task.block, p);
      release(*rows.format);
    }
  });
}

void gemm(const Rows& rows, const PackedWeight& w, const TileSink& sink) {
  for_each_panel(rows, w, Products(rows, w, sink));
}

}  // namespace qfx::cpu
