// What a thread does of a product: it fills rows, and has blocks of them meet panels.
#pragma once

#include "cpu/gemm/gemm.h"

namespace qfx::cpu {

// The panels of a task, two at a time where that is for its rows.
void run_task(const Rows& rows, const Task& task, const PanelWork& work);

inline Extent extent_of(const Rows& rows, int64_t panels) {
  return {1, rows.count, panels, rows.format->tile_rows, most_rows(rows)};
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
inline int64_t rows_of_part(int64_t rows, int64_t threads, int64_t most) {
  return std::clamp<int64_t>(rows / (2 * threads), 1, most);
}

}  // namespace qfx::cpu
