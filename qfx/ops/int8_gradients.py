"""The matmuls of gradients in int8, on stochastically rounded gradients. Equation (T3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.layout import Layout
from qfx.ops.weight_values import weight_values
from qfx.values.limits import LARGEST_K

ops = torch.ops.qfx
_APART = 2**40  # between the seeds of parts


class TurnedPart(NamedTuple):
    """The rows `rows` of a weight w^ [N, K], transposed: the right operand of the product of a
    gradient [M, N]. `rows`: None for all. `packed`: the codes [K, rows] with scales of their rows.
    `factor` float32 [rows] multiplies the gradient; None for ones."""

    rows: slice | None
    packed: Tensor
    factor: Tensor | None


def parts_of_sum(terms: Any) -> list[slice | None]:
    """Returns the parts of a sum that int32 can hold each; None is all of it, which is not sliced:
    torch.func has no rule for a slice that is everything."""
    if terms <= LARGEST_K:
        return [None]
    return [slice(begin, begin + LARGEST_K) for begin in range(0, int(terms), LARGEST_K)]


def turned_codes(codes: Tensor, scale: Tensor) -> list[TurnedPart]:
    """Turns a weight with codes int8 [N, K] and a scale for each row, [N]: nothing is rounded."""
    ones, parts = scale.new_ones(codes.shape[1]), parts_of_sum(codes.shape[0])
    return [
        TurnedPart(rows, ops.pack_weight(_of(codes, rows).t(), ones), _of(scale, rows))
        for rows in parts
    ]


def turned_values(w: Tensor) -> list[TurnedPart]:
    """Turns a weight w^ [N, K] whose scales differ within a row: each column of a part is rounded
    to int8 with a scale of its own."""
    parts = []
    for rows in parts_of_sum(w.shape[0]):
        q, scale, _ = ops.quantize(_of(w, rows).t(), list(Code()))
        parts.append(TurnedPart(rows, ops.pack_weight(q, scale.reshape(-1)), None))
    return parts


def _of(tensor: Tensor, rows: slice | None) -> Tensor:
    return tensor if rows is None else tensor[rows]


def turned_weight(weight: Tensor, layout: Sequence[int], k: int) -> list[TurnedPart]:
    """Turns a packed weight."""
    fields = Layout(*layout)
    if fields.scale_group or fields.shift:
        return turned_values(weight_values(weight, layout, k, torch.float32))
    codes, scale, *_ = ops.unpack_weight(weight, list(layout), k)
    return turned_codes(codes, scale.reshape(-1))


def gradient_product(
    g: Tensor, parts: Iterable[TurnedPart], k: int, seed: Tensor, dtype: torch.dtype
) -> Tensor:
    """Quantizes the columns of g [M, N] that belong to each part, row by row and with stochastic
    rounding, and multiplies them by it: g w^, [M, k]. The sums of several parts are added in
    float32."""
    parts, found = [*parts], None
    for place, part in enumerate(parts):
        of_part = seed if place == 0 else seed + place * _APART
        columns = g if part.rows is None else g[:, part.rows]
        how = list(Code()), None, None, of_part, part.factor
        q, scale, zero_point = ops.quantize(columns, *how)
        result = dtype if len(parts) == 1 else torch.float32
        y = ops.linear(q, scale, zero_point, part.packed, list(Layout(k)), None, "none", result)
        found = y if found is None else found + y
    assert found is not None
    return found.to(dtype)  # type: ignore[no-any-return]


def int8_weight_gradient(
    g: Tensor, scale: Tensor, q: Tensor, zero_point: Tensor, seed: Tensor
) -> Tensor:
    """Computes sum_m g[m, n] scale[m] (q[m, k] - zero_point[m]) -> float32 [N, K], with the zero
    points as an additional column of q."""
    rows = q.shape[0]
    columns = torch.cat([q, zero_point.expand(rows, 1).to(torch.int8)], 1)
    parts = turned_codes(columns, scale.reshape(-1).expand(rows))
    product = gradient_product(g.t(), parts, columns.shape[1], seed, torch.float32)
    return product[:, :-1] - product[:, -1:]
