// One panel of a weight in groups of K times a block of rows, by the int8 tiles. (E3)
#pragma once

#include "cpu/gemm/group_rows.h"

namespace qfx::cpu {

// Values of a panel: of group g and column n at [g * step + n].
template <typename T>
struct PanelValues {
  const T* data;  // or null
  int64_t step;

  PanelValues from(int64_t g) const { return {data == nullptr ? nullptr : data + g * step, step}; }
};

// Groups of a panel, one after the other, as the tiles read them.
struct PanelGroups {
  const int8_t* b;        // [depth / 4][32][4]
  const int32_t* colsum;  // [32] of each group
  PanelValues<float> scale;
  PanelValues<int32_t> zero;
};

// The weights of a panel.
class PanelReader {
 public:
  virtual ~PanelReader() = default;
  // Of k in [begin, end), and the values of the groups from that of `begin` on.
  virtual PanelGroups read(int64_t begin, int64_t end) = 0;
  // Whether what follows on `b` is what will be read next.
  virtual bool in_order() const = 0;
};

// The memory of a thread while it works on a panel.
struct PanelMemory {
  Scratch raw, sums, scale, zero, codes, colsum, floats;
};

// Products of a block of rows with a panel, added up as floats.
class GroupedPanel {
 public:
  GroupedPanel(const Kernels& kernels, const GroupedRows& rows, const RowBlock& block,
               PanelReader& reader, PanelMemory& memory);

  // Float sums [rows of the block][32], in `memory`.
  float* run();

 private:
  int64_t end_of_block(int64_t k) const;
  const int8_t* ahead_of(int64_t begin, int64_t end) const;
  GroupTerms terms_of(int64_t m, int64_t g) const;
  GroupTileFn tile_of(bool fetch, int count) const;
  void add_in_tile(bool fetch, int64_t m, int count, int64_t begin, int64_t end) const;
  void add_raw(TileFn tile, int64_t m, int count, int64_t begin, int64_t end) const;

  const Kernels& kernels_;
  const GroupedRows& rows_;
  const PackedWeight& w_;
  const RowBlock& block_;
  PanelReader& reader_;
  const Passage how_;
  const int64_t most_;  // of K at a time
  int32_t* const raw_;  // where the format has no tiles for groups
  float* const sums_;
  PanelGroups now_ = {};  // what the reader gave last,
  int64_t begin_ = 0;     // from this k on
};

// Where the sums of rows and a panel go.
struct FinishedPanel {
  const PackedWeight& w;
  int64_t first, rows;  // of the output
  int64_t p;
  bool past_caches;
};

// Sums [rows][32] become outputs.
void finish_sums(const Kernels& kernels, const FinishedPanel& of, const FloatOutput& to,
                 const float* sums);

}  // namespace qfx::cpu
