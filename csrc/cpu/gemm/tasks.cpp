#include "cpu/gemm/tasks.h"

namespace qfx::cpu {
namespace {

// Whether panels in pairs are for a block of so many rows.
bool in_pairs(const Rows& rows, int64_t count) {
  const Tuning& tuning = rows.tuning;
  return tuning.streams > 1 && count <= tuning.stream_rows && count <= rows.format->pairs.rows;
}

}  // namespace

// A pair is of a panel in the first half and one in the second, so that each half is a stream.
void run_task(const Rows& rows, const Task& task, const PanelWork& work) {
  int64_t p = task.panel_begin;
  const bool pairs = in_pairs(rows, task.block.rows());
  const int64_t half = pairs ? (task.panel_end - p) / 2 : 0, second = p + half;
  for (int64_t i = 0; i < half; ++i) work.run_pair(task.block, p + i, second + i);
  work.run_all(task.block, p + 2 * half, task.panel_end);
  work.finish();
}

}  // namespace qfx::cpu
