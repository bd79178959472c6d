#include "cpu/gemm/meetings.h"

#include <algorithm>
#include <vector>

#include "cpu/core/parallel.h"
#include "cpu/gemm/cost_shares.h"
#include "cpu/gemm/tasks.h"

namespace qfx::cpu {
namespace {

bool is_empty(const Meeting& each) {
  return each.from.rows.count == 0 || each.columns.w.panels() == 0;
}

int64_t work_of(const Meeting& each) {
  const auto& [from, columns] = each;
  const int64_t k = std::max<int64_t>(columns.w.k, 1);
  return from.work() + work_of(from.rows.tuning, from.rows.count * columns.w.n * k);
}

void run_alone(const Meeting& each) {
  const auto& [from, columns] = each;
  run_alone(from, columns.w.panels(),
            [&](const Task& task) { run_task(from.rows, task, columns.work); });
}

// Rows of one of them.
struct RowPart {
  const RowSource& from;
  int64_t begin, end;
};

std::vector<RowPart> row_parts(std::span<const Meeting> all, int64_t threads) {
  int64_t rows = 0;
  for (const Meeting& each : all) rows += each.from.rows.count;
  const int64_t most = rows_of_part(rows, threads, all[0].from.part());
  std::vector<RowPart> parts;
  for (const auto& [from, columns] : all) {
    const int64_t count = from.rows.count;
    for (int64_t m = 0; m < count; m += most) parts.push_back({from, m, std::min(m + most, count)});
  }
  return parts;
}

// A panel costs as much as the rows that it meets; for few rows, as long as it takes to read it.
CostShares shares_of(std::span<const Meeting> all) {
  CostShares shares;
  for (size_t i = 0; i < all.size(); ++i) {
    const Rows& rows = all[i].from.rows;
    if (is_empty(all[i])) continue;
    const PackedWeight& w = all[i].columns.w;
    const int64_t height = even_part(rows.count, most_rows(rows), rows.format->tile_rows);
    for (int64_t m = 0; m < rows.count; m += height) {
      const RowBlock block = {m, std::min(m + height, rows.count)};
      const int64_t cost =
          std::max(block.rows(), rows.tuning.stream_rows) * std::max<int64_t>(w.k, 1);
      shares.add(static_cast<int64_t>(i), block, w.panels(), cost);
    }
  }
  return shares;
}

}  // namespace

void for_each_panel(std::span<const Meeting> all) {
  int64_t work = 0;
  for (const Meeting& each : all) work += is_empty(each) ? 0 : work_of(each);
  const int64_t threads = threads_for(work);
  if (threads == 1) {
    for (const Meeting& each : all) {
      if (!is_empty(each)) run_alone(each);
    }
    return;
  }
  const CostShares shares = shares_of(all);
  const std::vector<RowPart> parts = row_parts(all, threads);
  const auto fill = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) parts[i].from.fill(parts[i].begin, parts[i].end);
  };
  in_two_steps(threads, static_cast<int64_t>(parts.size()), 1, fill, [&](int64_t share) {
    shares.for_each_task(share, threads, [&](const Task& task) {
      const auto& [from, columns] = all[task.product];
      run_task(from.rows, task, columns.work);
      release(*from.rows.format);
    });
  });
}

}  // namespace qfx::cpu
