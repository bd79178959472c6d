"""Buckets: the batch sizes and numbers of tokens for which programs of a step exist, and padding to
them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qfx.ops.kv_blocks import LARGEST_STEP

ROWS = (1, 4, 16, LARGEST_STEP)  # buckets: tokens of a step; shorter inputs are padded
SIZES = (1, 2, 4, 8, 16)  # batch sizes of a step, if no requested batch size is large enough
INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}  # dtypes of token ids
MOST_ROWS = 16  # programs for up to 16 tokens return all logits, longer ones those of one token


def bucket_for(count: int, room: int, among: Sequence[int] = ROWS) -> int:
    """Returns the number of tokens of the next step, one of `among` and at most `room`, if `count`
    tokens are still to be processed. One step takes all of them if at most half of it is padding;
    otherwise the largest step without padding is chosen."""
    fitting = [rows for rows in among if rows <= room]
    enough = [rows for rows in fitting if count <= rows <= 2 * count]
    return enough[0] if enough else max(rows for rows in fitting if rows <= count)


def batch_size_for(batch: int, among: Sequence[int]) -> int:
    """Returns the batch size of the step for `batch` sequences: the smallest of `among` that is
    large enough, otherwise the smallest of SIZES, otherwise `batch`."""
    for sizes in (among, SIZES):
        if enough := [size for size in sizes if size >= batch]:
            return min(enough)
    return batch


def padded(values: Tensor, batch: int, rows: int, by: int = 0) -> Tensor:
    """Pads values [.., B, T] to [.., batch, rows] with the number `by`; the result is
    contiguous."""
    if values.shape[-2:] == (batch, rows):
        return values.contiguous()
    missing = (0, rows - values.shape[-1], 0, batch - values.shape[-2])
    return torch.nn.functional.pad(values, missing, value=by)
