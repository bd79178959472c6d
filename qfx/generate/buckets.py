"""How many texts and tokens a step has, and how fewer are filled up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qfx.ops.kv_blocks import LARGEST_STEP

ROWS = (1, 4, 16, LARGEST_STEP)  # tokens of a step, to which fewer are filled up
SIZES = (1, 2, 4, 8, 16)  # texts of a step, where none were asked for that are enough
INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}  # types of tokens
MOST_ROWS = 16  # whose logits a program gives; of more only those of one


def bucket_for(count: int, room: int, among: Sequence[int] = ROWS) -> int:
    """The rows of the step that reads the first of `count` tokens: all, if few are filled up."""
    fitting = [rows for rows in among if rows <= room]
    enough = [rows for rows in fitting if count <= rows <= 2 * count]
    return enough[0] if enough else max(rows for rows in fitting if rows <= count)


def batch_size_for(texts: int, among: Sequence[int]) -> int:
    """The texts of the step that serves `texts`: the fewest of `among` that are enough, else the
    fewest of SIZES, else as many."""
    for sizes in (among, SIZES):
        if enough := [size for size in sizes if size >= texts]:
            return min(enough)
    return texts


def padded(values: Tensor, texts: int, rows: int, by: int = 0) -> Tensor:
    """[.., B, T] -> [.., texts, rows], contiguous, filled up by a number."""
    if values.shape[-2:] == (texts, rows):
        return values.contiguous()
    missing = (0, rows - values.shape[-1], 0, texts - values.shape[-2])
    return torch.nn.functional.pad(values, missing, value=by)
