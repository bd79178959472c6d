#include "cpu/gemm/gemm.h"

#include <algorithm>

#include "cpu/core/parallel.h"
#include "cpu/gemm/k_parts.h"
#include "cpu/gemm/tasks.h"
#include "cpu/gemm/whole_product.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kArrangedBytes = 16 << 20;

// Rows of a block: whole tiles, so that a product has no more of them than its rows need.
int64_t block_rows(const Format& format, const Tuning& tuning, int64_t rows) {
  return even_part(rows, tuning.block_rows, format.tile_rows);
}

// A task whose panels are those of the weights in their order.
void run_task(const Rows& rows, const Task& task, std::span<const Columns> all) {
  int64_t first = 0;
  for (const Columns& each : all) {
    const int64_t begin = std::max<int64_t>(task.panel_begin - first, 0);
    const int64_t end = std::min(task.panel_end - first, each.w.panels());
    if (begin < end) run_task(rows, {task.product, task.block, begin, end}, each.work);
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

// Whether the products were better computed in parts of K, and are.
bool multiplied_in_parts(const RowSource& from, std::span<const Product> products) {
  const auto [n, panels] = outputs_of(products);
  const int64_t k = products[0].w.k, threads = threads_of(from, n, k);
  if (threads == 1 || from.rows.count == 0 || panels == 0) return false;
  const int64_t parts = k_parts_of(extent_of(from.rows, panels), k, threads);
  if (parts > 1) gemm_in_parts(from, products, parts, threads);
  return parts > 1;
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
  arrange_rows(w, q, 0, &zero_point, {m, m + 1}, rows);
}

void arrange_rows(const PackedWeight& w, const int8_t* q, int64_t stride, const int32_t* zero_point,
                  const RowBlock& which, const Rows& rows) {
  const Format& format = *rows.format;
  const int64_t depth = round_up(w.k, format.k_multiple);
  for (int64_t m = which.begin; m < which.end; ++m, q += stride, ++zero_point) {
    rows.add[m] = format.arrange(q, w.k, depth, rows.a + m * rows.stride);
    rows.mul[m] = static_cast<int32_t>(static_cast<uint32_t>(*zero_point) +
                                       static_cast<uint32_t>(format.mul_offset));
  }
}

void for_each_panel(const RowSource& from, std::span<const Columns> all) {
  const Rows& rows = from.rows;
  const Outputs outputs = outputs_of(all);
  if (rows.count == 0 || outputs.n == 0) return;
  const int64_t threads = threads_of(from, outputs.n, all[0].w.k);
  const auto run = [&](const Task& task) { run_task(rows, task, all); };
  if (threads == 1) return run_alone(from, outputs.panels, run);
  const Grid grid = grid_of(extent_of(rows, outputs.panels), threads);
  in_two_steps(
      threads, rows.count, rows_of_part(rows.count, threads, from.part()),
      [&](int64_t begin, int64_t end) { from.fill(begin, end); },
      [&](int64_t share) {
        grid.for_each_task(share, run);
        release(*rows.format);
      });
}

void gemm(const RowSource& from, const PackedWeight& w, const TileSink& sink) {
  const Product product = {w, sink};
  if (multiplied_in_parts(from, {&product, 1})) return;
  const WholeProduct work(from.rows, w, sink);
  const Columns all[] = {{w, work}};
  for_each_panel(from, all);
}

void gemm(const RowSource& from, std::span<const Product> products) {
  if (multiplied_in_parts(from, products)) return;
  std::vector<WholeProduct> works;
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
  const int64_t panels = batch[0].panels.weight.panels();
  const int64_t part = rows_of_part(rows.count, threads, batch[0].from.part());
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
          run_task(from.rows, task, WholeProduct(from.rows, packed.weight, sink));
        });
        release(*rows.format);
      });
}

}  // namespace qfx::cpu
