#include "cpu/gemm/gemm.h"

#include <algorithm>

#include "cpu/core/parallel.h"
#include "cpu/gemm/k_parts.h"
#include "cpu/gemm/passage.h"
#include "cpu/gemm/strips.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kArrangedBytes = 16 << 20;

// Rows of a block: whole tiles, so that a product has no more of them than its rows need.
int64_t block_rows(const Format& format, const Tuning& tuning, int64_t rows) {
  return even_part(rows, tuning.block_rows, format.tile_rows);
}

// Whole products, handed to a sink.
class Products final : public PanelWork {
 public:
  Products(const Rows& rows, const PackedWeight& w, const TileSink& sink)
      : rows_(rows), w_(w), sink_(sink), strips_(strips_for(rows, w, sink)) {}

  void run(const RowBlock& block, int64_t p) const override {
    if (in_strips(block)) return run_all(block, p, p + 1);
    finish();
    run_panel(rows_, w_, block, p, sums_for(block.rows() + kMaxTileRows), sink_);
  }

  void run_all(const RowBlock& block, int64_t p, int64_t end) const override {
    if (in_strips(block)) {
      int32_t* sums = sums_for(block.rows() + kMaxTileRows);
      return run_strips({rows_, w_, sink_, *strips_}, block, p, end, sums);
    }
    const Passage how = passage_of(rows_, w_, block.rows());
    const bool few = strips_ == nullptr && how.streams && block.rows() <= how.height;
    if (!few) return PanelWork::run_all(block, p, end);
    const int64_t most = panels_at_once(block.rows()), size = block.rows() * kPanel;
    for (int64_t next; p < end; p = next) {
      next = std::min(p + most, end);
      int32_t* sums = sums_for(most * block.rows());
      sink_.fetch_panels(p, next);
      for (int64_t q = p; q < next; ++q) {
        multiply_few(rows_, w_, block, q, how, sums + (q - p) * size);
      }
      for (int64_t q = p; q < next; ++q, sums += size) store(block, q, sums);
    }
  }

  void finish() const override {
    if (strips_ != nullptr) finish_strips(*strips_);
  }

  void run_pair(const RowBlock& block, int64_t p, int64_t q) const override {
    const int64_t count = block.rows();
    int32_t* sums = sums_for(2 * count);
    if (strips_ != nullptr && count <= strips_->least_rows) {
      return run_strip_pair({rows_, w_, sink_, *strips_}, block, p, q, sums);
    }
    multiply_pair(rows_, w_, block, p, q, sums);
    store(block, p, sums);
    store(block, q, sums + count * kPanel);
  }

 private:
  bool in_strips(const RowBlock& block) const {
    return strips_ != nullptr && block.rows() > strips_->least_rows;
  }

  void store(const RowBlock& block, int64_t p, const int32_t* sums) const {
    Panel columns;
    sink_.load_panel(p, &columns);
    sink_.tile(sums, block.begin, static_cast<int>(block.rows()), p, columns);
  }

  static int32_t* sums_for(int64_t rows) {
    thread_local Scratch scratch;
    return scratch.get<int32_t>(rows * kPanel);
  }

  const Rows& rows_;
  const PackedWeight& w_;
  const TileSink& sink_;
  const Strips* strips_;
};

// Whether panels in pairs are for a block of so many rows.
bool in_pairs(const Rows& rows, int64_t count) {
  const Tuning& tuning = rows.tuning;
  return tuning.streams > 1 && count <= tuning.stream_rows && count <= rows.format->pairs.rows;
}

// A pair is of a panel in the first half and one in the second, so that each half is a stream.
void run_task(const Task& task, bool pairs, const PanelWork& work) {
  int64_t p = task.panel_begin;
  const int64_t half = pairs ? (task.panel_end - p) / 2 : 0, second = p + half;
  for (int64_t i = 0; i < half; ++i) work.run_pair(task.block, p + i, second + i);
  work.run_all(task.block, p + 2 * half, task.panel_end);
  work.finish();
}

// A task whose panels are those of the weights in their order.
void run_task(const Task& task, bool pairs, std::span<const Columns> all) {
  int64_t first = 0;
  for (const Columns& each : all) {
    const int64_t begin = std::max<int64_t>(task.panel_begin - first, 0);
    const int64_t end = std::min(task.panel_end - first, each.w.panels());
    if (begin < end) run_task({task.product, task.block, begin, end}, pairs, each.work);
    first += each.w.panels();
  }
}

// The columns of several weights, and their panels.
struct Outputs {
  int64_t n = 0, panels = 0;
};

template <typename Each>
Outputs outputs_of(std::span<const Each> all) {
  Outputs found;
  for (const Each& each : all) found.n += each.w.n, found.panels += each.w.panels();
  return found;
}

int64_t threads_of(const RowSource& from, int64_t n, int64_t k) {
  const Rows& rows = from.rows;
  return threads_for(from.work() + work_of(rows.tuning, rows.count * n * std::max<int64_t>(k, 1)));
}

Extent extent_of(const Rows& rows, int64_t panels) {
  return {1, rows.count, panels, rows.format->tile_rows, most_rows(rows)};
}

// Whether the products were better computed in parts of K, and are.
bool multiplied_in_parts(const RowSource& from, std::span<const Product> products) {
  const auto [n, panels] = outputs_of(products);
  const int64_t k = products[0].w.k, threads = threads_of(from, n, k);
  if (threads == 1 || from.rows.count == 0 || panels == 0) return false;
  const int64_t parts = k_parts_of(extent_of(from.rows, panels), k, threads);
  if (parts > 1) gemm_in_parts(from, products, parts, threads);
  return parts > 1;
}

// On one thread each block is filled right before its products, so that its codes are in cache.
template <typename F>
void run_alone(const RowSource& from, int64_t panels, const F& run) {
  const Rows& rows = from.rows;
  const struct Released {  // whatever filling throws
    const Format& format;
    ~Released() { release(format); }
  } end = {*rows.format};
  grid_of(extent_of(rows, panels), 1).for_each_task(0, [&](const Task& task) {
    from.fill(task.block.begin, task.block.end);
    run(task);
  });
}

// Rows that a thread fills at a time: few enough that each of them gets some.
int64_t rows_of_part(int64_t rows, int64_t threads) {
  constexpr int64_t kMost = 8;  // which a source may work on side by side
  return std::clamp<int64_t>(rows / (2 * threads), 1, kMost);
}

// An odd number of cache lines, or the rows of a tile would share cache sets.
int64_t row_stride(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

}  // namespace

const Format& format_for(const Kernels& kernels, Operands operands, int64_t rows) {
  const Format* format = kernels.formats[static_cast<int>(operands)];
  while (format->below != nullptr && rows < tuning_of(*format).minimum_rows) format = format->below;
  return *format;
}

int64_t tile_rows_for(const Format& format, int64_t rows) {
  const int64_t block = block_rows(format, tuning_of(format), rows);
  return tile_height(std::clamp<int64_t>(rows, 1, block), format.tile_rows);
}

int64_t rows_at_once(const Kernels& kernels, const PackedWeight& w, int64_t rows) {
  const Format& format = format_for(kernels, Operands::kWide, rows);
  const int64_t block = tuning_of(format).block_rows;
  const int64_t row_bytes = row_stride(w.padded_k * kMaxBytesPerCode);
  return std::max<int64_t>(kArrangedBytes / row_bytes / block, 1) * block;
}

RowsMemory& rows_memory() {
  thread_local RowsMemory memory;
  return memory;
}

Rows make_rows(const Format& format, int64_t count, const PackedWeight& w, RowsMemory& memory) {
  const int64_t stride = row_stride(round_up(w.k, format.k_multiple) * format.bytes_per_code);
  int32_t* add = memory.constants.get<int32_t>(2 * count);
  // Strips are all as tall as the first, and read beyond the last row.
  uint8_t* codes = memory.codes.get<uint8_t>((count + kMaxTileRows) * stride);
  return {&format, tuning_of(format), codes, count, stride, add, add + count};
}

void arrange_row(const PackedWeight& w, const int8_t* q, int32_t zero_point, int64_t m,
                 const Rows& rows) {
  const Format& format = *rows.format;
  const int64_t depth = round_up(w.k, format.k_multiple);
  rows.add[m] = format.arrange(q, w.k, depth, rows.a + m * rows.stride);
  rows.mul[m] = static_cast<int32_t>(static_cast<uint32_t>(zero_point) +
                                     static_cast<uint32_t>(format.mul_offset));
}

void for_each_panel(const RowSource& from, std::span<const Columns> all) {
  const Rows& rows = from.rows;
  const Outputs outputs = outputs_of(all);
  if (rows.count == 0 || outputs.n == 0) return;
  const int64_t threads = threads_of(from, outputs.n, all[0].w.k);
  const auto run = [&](const Task& task) {
    run_task(task, in_pairs(rows, task.block.rows()), all);
  };
  if (threads == 1) return run_alone(from, outputs.panels, run);
  const Grid grid = grid_of(extent_of(rows, outputs.panels), threads);
  in_two_steps(
      threads, rows.count, rows_of_part(rows.count, threads),
      [&](int64_t begin, int64_t end) { from.fill(begin, end); },
      [&](int64_t share) {
        grid.for_each_task(share, run);
        release(*rows.format);
      });
}

void gemm(const RowSource& from, const PackedWeight& w, const TileSink& sink) {
  const Product product = {w, sink};
  if (multiplied_in_parts(from, {&product, 1})) return;
  const Products work(from.rows, w, sink);
  const Columns all[] = {{w, work}};
  for_each_panel(from, all);
}

void gemm(const RowSource& from, std::span<const Product> products) {
  if (multiplied_in_parts(from, products)) return;
  std::vector<Products> works;
  std::vector<Columns> all;
  works.reserve(products.size());
  for (const Product& each : products) {
    all.push_back({each.w, works.emplace_back(from.rows, each.w, each.sink)});
  }
  for_each_panel(from, all);
}

void gemm(const std::vector<Pairing>& batch, int64_t threads) {
  const Rows& rows = batch[0].from.rows;
  const int64_t count = static_cast<int64_t>(batch.size());
  const int64_t panels = batch[0].panels.weight.panels(), part = rows_of_part(rows.count, threads);
  const int64_t parts = panels + (rows.count + part - 1) / part;
  const Extent extent = {count, rows.count, panels, rows.format->tile_rows, most_rows(rows)};
  const Grid grid = grid_of(extent, threads);
  const auto fill = [&](int64_t i) {
    const Pairing& product = batch[i / parts];
    const int64_t p = i % parts, m = (p - panels) * part;
    if (p < panels) return product.panels.fill(p, p + 1);
    product.from.fill(m, std::min(m + part, rows.count));
  };
  in_two_steps(
      threads, count * parts, 1,
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) fill(i);
      },
      [&](int64_t share) {
        grid.for_each_task(share, [&](const Task& task) {
          const auto& [from, packed, sink] = batch[task.product];
          const Products work(from.rows, packed.weight, sink);
          run_task(task, in_pairs(from.rows, task.block.rows()), work);
        });
        release(*rows.format);
      });
}

}  // namespace qfx::cpu
