"""How many tokens a step has, and how fewer are filled up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROWS = (1, 4, 16, 128)  # tokens of a step, to which fewer are filled up
INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}  # types of tokens
MOST_ROWS = 16  # whose logits a program gives; of more only those of one


def rows_for(count: int, room: int, among: Sequence[int] = ROWS) -> int:
    """The rows of the step that reads the first of `count` tokens: all, if few are filled up."""
    fitting = [rows for rows in among if rows <= room]
    enough = [rows for rows in fitting if count <= rows <= 2 * count]
    return enough[0] if enough else max(rows for rows in fitting if rows <= count)


def filled(values: Tensor, rows: int) -> Tensor:
    """[B, T] -> [B, rows], by zeros, contiguous."""
    if values.shape[1] == rows:
        return values.contiguous()
    return torch.nn.functional.pad(values, (0, rows - values.shape[1]))
