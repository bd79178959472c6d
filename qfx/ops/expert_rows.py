"""Rows sorted by expert, as `linear_experts` takes them: of tensors, or of traced values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

aten = torch.ops.aten


class SortedRows(NamedTuple):
    """Rows [R, K] and int32 offsets [E], where those of each expert end. `order`: the place that
    each row had, None if they are where they were."""

    rows: Any
    offsets: Any
    order: Any = None

    def back(self, y: Any, experts: int) -> Any:
        """Returns outputs [R, N] as they belong to the matrices given before: [R, 1, N] if they
        had numbers, or [E, M, N]."""
        if self.order is None:
            return aten.unflatten.int(y, 0, [experts, -1])
        return aten.unsqueeze.default(aten.index.Tensor(y, [torch.argsort(self.order)]), 1)


def in_equal_parts(x: Any, experts: int) -> SortedRows:
    """Returns the rows of x [E, M, K], where those of each expert are together."""
    counts = aten.new_full.default(x, [experts], aten.sym_size.int(x, 1), dtype=torch.int64)
    ends = aten.to.dtype(aten.cumsum.default(counts, 0), torch.int32)
    return SortedRows(aten.flatten.using_ints(x, 0, 1), ends)


def by_number(x: Any, numbers: Any, experts: int) -> SortedRows:
    """Returns the rows of x [R, 1, K], sorted by the numbers [R] of their experts. Numbers below 0
    count from the end, as those of an index do. Rows of experts that do not exist come last."""
    known = torch.where(aten.lt.Scalar(numbers, 0), aten.add.Scalar(numbers, experts), numbers)
    sorted_ = aten.sort.default(known)
    values = aten.to.dtype(sorted_[0], torch.float32)  # exact up to 2^24
    counts = aten.histc.default(values, experts, 0, experts - 1)
    ends = aten.cumsum.default(counts, 0, dtype=torch.int32)
    rows = aten.index.Tensor(aten.squeeze.dim(x, 1), [sorted_[1]])
    return SortedRows(rows, ends, sorted_[1])
