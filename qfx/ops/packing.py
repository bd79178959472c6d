"""Packing and Constant: values that define how the constant operands of an int8 matmul are made.

`parts_of` is the one definition of a packed weight. It runs on tensors, and on `fx.Proxy` to emit
the same operators into a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.ops.experts import stack_packed
from qfx.ops.quantize import SMALLEST_SCALE, code_range
from qfx.ops.storage import quantized
from qfx.values.rounding import Rounding
from qfx.values.scheme import PER_COLUMN, QSpec

ops = torch.ops.qfx
aten = torch.ops.aten


class Constant(NamedTuple):
    """A vector from a recipe that a graph uses: a factor, a static scale or zero point, or
    outliers."""

    values: tuple[float, ...]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def tensor(self) -> Tensor:
        return torch.tensor(self.values, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Packing:
    """The way in which a weight is stored: divided by `factor` [K], rotated in blocks, then
    quantized by `spec`. The `outliers` columns are stored separately in float. `rounding`: the
    codes, if they are not rounded to nearest. `group`: `Scheme.group`; by default the group of
    `spec`."""

    spec: QSpec
    factor: tuple[float, ...] | None = None
    rotation: int = 0
    outliers: tuple[int, ...] = ()
    guarded: bool = False  # also store what the guard's bound (B5) needs
    rounding: Rounding | None = None
    group: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", self.group or self.spec.group)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensors of a weight that is stored in this way: fields of
        `qfx.weights.cache.Packed`."""
        factor = ("factor",) if self.spec.axes == PER_COLUMN else ()
        columns = ("columns",) if self.outliers else ()
        error = ("error",) if self.guarded else ()
        return ("weight", *factor, *columns, *error)

    def __str__(self) -> str:
        transform = ("_f" if self.factor else "") + (f"_h{self.rotation}" if self.rotation else "")
        transform += f"_k{self.group}" if self.group != self.spec.group else ""
        outliers = f"_o{len(self.outliers)}" if self.outliers else ""
        rounded = f"_{self.rounding.method}" if self.rounding else ""
        return f"{self.spec}{transform}{outliers}{rounded}{'_guarded' if self.guarded else ''}"

    def constants(self) -> dict[str, Constant]:
        """Returns the constants that `parts_of` needs in addition to the weight."""
        found = {}
        if self.factor is not None:
            found["factor"] = Constant(self.factor)
        if self.outliers:
            found["outliers"] = Constant(self.outliers, torch.int64)
        return found


def parts_of(
    w_nk: Any, packing: Packing, constants: dict[str, Any], k: int | None
) -> dict[str, Any]:
    """Returns the parts of a packed weight, from w_nk and the `Packing.constants`. (R1) (R3)
    (Q1)-(Q3)

    If `constants` contains `codes`, int8 [N, K], as found by (Q9), they replace the codes rounded
    to nearest (Q3).
    """
    spec, found, given = packing.spec, {}, w_nk
    factor, outliers = constants.get("factor"), constants.get("outliers")
    if outliers is not None:
        columns = aten.index_select.default(w_nk, 1, outliers)
        found["columns"] = aten.to.dtype(columns, torch.float32)
        w_nk = aten.index_fill.int_Scalar(w_nk, 1, outliers, 0.0)
    if spec.axes == PER_COLUMN:
        factor = found["factor"] = _column_factor(w_nk, spec.bits)
    if factor is not None:
        w_nk = torch.div(aten.to.dtype(w_nk, torch.float32), factor)
    codes = constants.get("codes")
    weight, triple = quantized(w_nk, spec, packing.group, packing.rotation, k, codes)
    if packing.guarded:
        found["error"] = _error(given, w_nk, triple, packing, k)
    return {"weight": weight, **found}


def expert_parts(
    w_enk: Any, experts: int, packing: Packing, k: int | None, codes: Tensor | None = None
) -> dict[str, Any]:
    """Returns the parts of the packed weights [N, K] of several experts: one tensor with a row for
    each. No more than one of them is computed at a time. `codes`: int8 [E, N, K], as in
    `parts_of`."""

    def row(e: int) -> Any:
        given = {} if codes is None else {"codes": codes[e]}
        return parts_of(aten.select.int(w_enk, 0, e), packing, given, k)["weight"]

    rows = map(row, range(experts))
    if isinstance(w_enk, Tensor):
        return {"weight": stack_packed(rows, experts)}
    return {"weight": aten.stack.default([*rows])}


def _error(w: Any, w_nk: Any, triple: Any, packing: Packing, k: int | None) -> Any:
    """Returns alpha and beta of the bound (B5), float32 [2]: the largest norm, over the rows of a
    weight, of the values of its codes, and of their error, relative to the norm of the row of
    `w`."""
    wanted = aten.to.dtype(w_nk, torch.float32)
    if packing.rotation:
        wanted = ops.rotate.default(wanted, None, packing.rotation)
    zero_point = None if packing.spec.symmetric else triple[2]
    given = (triple[0], triple[1], zero_point)
    codes = ops.dequantize.default(*given, None, None, "none", torch.float32)
    roundings = 2.0**-16
    if packing.spec.grouped or packing.group:
        assert k is not None
        row = -(-k // (packing.spec.group or k)) * (packing.spec.group or k)  # of whole groups
        codes = aten.slice.Tensor(torch.reshape(codes, (-1, row)), 1, 0, k)
        roundings += -(-k // (packing.group or k)) * 2.0**-22
    size = aten.clamp_min.default(_norms(w), 2.0**-1000)
    beta = _norms(torch.sub(wanted, codes)) + _norms(wanted) * roundings
    parts = torch.stack([_norms(codes), beta])
    padded = aten.constant_pad_nd.default(torch.div(parts, size), [0, 1])  # a weight without rows
    return aten.to.dtype(torch.mul(aten.amax.default(padded, [1]), 1 + 2.0**-23), torch.float32)


def _norms(w_nk: Any) -> Any:
    """Returns the norm of each row, in float64."""
    return aten.linalg_vector_norm.default(w_nk, 2, [1], False, dtype=torch.float64)


def _column_factor(w_nk: Any, bits: int) -> Any:
    """Returns factor_k = max_n |w_nk| / qmax, with which the weight has a single scale. (R2)"""
    largest = aten.amax.default(aten.abs.default(aten.to.dtype(w_nk, torch.float32)), [0])
    return aten.clamp_min.default(torch.div(largest, code_range(bits, True)[1]), SMALLEST_SCALE)
