// The integer GEMM: acc[m][n] = sum_k (q[m][k] - z[m]) w[n][k], handed on tile by tile. (G1)
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/core/scratch.h"
#include "cpu/gemm/grid.h"
#include "cpu/gemm/pack.h"
#include "cpu/gemm/tuning.h"
#include "cpu/kernels/tables/kernels.h"
#include "cpu/kernels/tables/sums.h"

namespace qfx::cpu {

// Activations in an operand format, and its parameters as they were when the rows were made.
struct Rows {
  const Format* format;
  Tuning tuning;
  uint8_t* a;
  int64_t count, stride;
  int32_t *add, *mul;
};

// The fastest format that is exact for these codes and this many rows.
const Format& format_for(const Kernels& kernels, Operands operands, int64_t rows);

// What a thread calls after its last tile.
inline void release(const Format& format) {
  if (format.release != nullptr) format.release();
}

// How many of `rows` rows to arrange at a time: whole row blocks, about 16 MB of them.
int64_t rows_at_once(const Kernels& kernels, const PackedWeight& w, int64_t rows);

// What holds rows until the next ones.
struct RowsMemory {
  Scratch codes, constants;
};

// Room for `count` rows of w.k codes.
Rows make_rows(const Format& format, int64_t count, const PackedWeight& w, RowsMemory& memory);

// Memory of the calling thread, reused between calls.
RowsMemory& rows_memory();

// Arranges the codes of row m.
void arrange_row(const PackedWeight& w, const int8_t* q, int32_t zero_point, int64_t m,
                 const Rows& rows);

// Arranges the codes of rows `which`, which lie `stride` apart.
void arrange_rows(const PackedWeight& w, const int8_t* q, int64_t stride, const int32_t* zero_point,
                  const RowBlock& which, const Rows& rows);

// Rows, and what makes them ready; called from several threads at once for different rows.
struct RowSource {
  Rows rows;

  explicit RowSource(const Rows& rows) : rows(rows) {}
  virtual ~RowSource() = default;
  virtual void fill(int64_t begin, int64_t end) const = 0;
  virtual int64_t work() const = 0;  // of all rows, in parallel.h's unit
  // Rows that a thread had best fill at a time, at most: so many are worked on side by side.
  virtual int64_t part() const { return 8; }
};

// A weight, and what packs some of its panels; called from several threads at once for different
// ones.
struct PanelSource {
  PackedWeight weight;

  explicit PanelSource(const PackedWeight& weight) : weight(weight) {}
  virtual ~PanelSource() = default;
  virtual void fill(int64_t begin, int64_t end) const = 0;
};

// How a block of rows meets a panel.
struct Passage {
  int64_t depth;  // of an arranged row
  int64_t block;  // of K at a time
  int64_t height;
  bool streams;                  // the weights are streamed; see Tuning::stream_rows
  int64_t fetching;              // the row of the block whose tile prefetches
  const TileFn* fetching_tiles;  // of 1, 2, ... rows
};

// The hint with which weights are fetched for a block of so many rows.
int64_t hint_for(const Tuning& tuning, int64_t rows);

// Rows of a block at most; see Tuning::block_rows and block_bytes.
inline int64_t most_rows(const Rows& rows) {
  return std::max(rows.tuning.block_rows, rows.tuning.block_bytes / rows.stride);
}

Passage passage_of(const Rows& rows, const PackedWeight& w, int64_t count);

// With few rows, the number of panels that are multiplied before their sums are finished, because
// no weights are fetched meanwhile. The sums take 8 KB at most and stay in the first cache.
inline int64_t panels_at_once(int64_t rows) { return std::clamp<int64_t>(64 / rows, 1, 16); }

// What is to be done with a block of rows and panel p, by several threads at once.
class PanelWork {
 public:
  virtual ~PanelWork() = default;
  virtual void run(const RowBlock& block, int64_t p) const = 0;
  // The same for panels p, p + 1, ... that lie one after the other.
  virtual void run_all(const RowBlock& block, int64_t p, int64_t end) const {
    for (; p < end; ++p) run(block, p);
  }
  // The same for two panels, whose weights may be streamed side by side.
  virtual void run_pair(const RowBlock& block, int64_t p, int64_t q) const {
    run(block, p);
    run(block, q);
  }
  // After the last panel of a block, on the thread that ran it: finishes what is left.
  virtual void finish() const {}
};

// A weight, and what is to be done with its panels.
struct Columns {
  const PackedWeight& w;
  const PanelWork& work;
};

// Fills the rows, then runs the work of all weights, which have one K: on one team of threads, each
// with an equal share of it.
void for_each_panel(const RowSource& from, std::span<const Columns> all);

// Receives finished tiles; called from several threads at once for different tiles.
class TileSink {
 public:
  virtual ~TileSink() = default;
  // Column parameters of panel p, read once before its tiles.
  virtual void load_panel(int64_t p, Panel* panel) const = 0;
  // Prefetches those of panels p, p + 1, ...
  virtual void fetch_panels(int64_t, int64_t) const {}
  // Raw sums [rows][32] of rows m.. and panel p; see cpu/kernels/tables/tiles.h for the row
  // constants.
  virtual void tile(const int32_t* raw, int64_t m, int rows, int64_t p,
                    const Panel& panel) const = 0;
  // The epilogue that `tile` would be, for formats that finish a tile while they multiply the next;
  // false where it is none.
  virtual bool epilogue_of(const int32_t*, int64_t, int, int64_t, const Panel&,
                           EpilogueArgs*) const {
    return false;
  }
};

// Rows of the tiles that a GEMM of this many rows is cut into.
int64_t tile_rows_for(const Format& format, int64_t rows);

void gemm(const RowSource& from, const PackedWeight& w, const TileSink& sink);

// Several weights of one K, by the same rows.
struct Product {
  const PackedWeight& w;
  const TileSink& sink;
};
void gemm(const RowSource& from, std::span<const Product> products);

// A product of two operands that both are to be made ready.
struct Pairing {
  const RowSource& from;
  const PanelSource& panels;
  const TileSink& sink;
};

// One or more of the same sizes and format, on one team of threads.
void gemm(const std::vector<Pairing>& batch, int64_t threads);

}  // namespace qfx::cpu
