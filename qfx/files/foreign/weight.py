"""ForeignWeight: a quantized weight of another tool, and its conversion to a `qfx.nn.Linear`.

Only `unkept` and `parts_of` know how qfx stores such weights.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from qfx.nn.frozen_state import scheme_tensor
from qfx.nn.scheme_tensor import KEY
from qfx.nn.serialized_weight import stream_of
from qfx.nn.state_checks import check_finite
from qfx.ops.quantize import SMALLEST_SCALE
from qfx.values.scheme import GROUP_MULTIPLE, PACKED_BITS, PACKED_GROUPS, QSpec, Scheme

# How activations are quantized; None for float, "file" for what the file specifies.
Activations: TypeAlias = QSpec | Literal["file"] | None


class ForeignGrid(NamedTuple):
    """The format of a quantized weight, known before the weight is read.

    Codes are integers of `bits` bits in two's complement. `group`: the number of elements of a row
    that share a scale, 0 for all. `signs`: whether scales may be negative. `zeros`: whether there
    are zero points. `minimum`: whether each group has a float that is added. `half`: the dtype of
    scales and minimums, None for float32.
    """

    bits: int
    group: int = 0
    signs: bool = False
    zeros: bool = False
    minimum: bool = False
    half: torch.dtype | None = None

    @property
    def packed(self) -> bool:
        """Whether a `qfx.nn.Linear` can store these codes with the same number of bits."""
        fits = self.bits in PACKED_BITS and self.group in PACKED_GROUPS
        return fits and self.half in (torch.float16, torch.bfloat16)

    @property
    def usual(self) -> QSpec:
        """The quantization of activations that is used if the file does not name one. A weight with
        groups gets activations with groups: these cost little more, and activations that are not
        rotated need them."""
        return QSpec(group=self.group) if self.group else QSpec(symmetric=False)


class ForeignWeight(NamedTuple):
    """A quantized weight of another tool.

    `codes`: int8 [N, K]. `scale`: [N, G], in the dtype of the file. `zero_point`: int32 [N, G] or
    None. `minimum`: [N, G] or None. A value is `scale * (code - zero_point)`, or with a minimum
    `scale * (code + 2^(bits - 1)) + minimum`, each operation in float32.
    """

    codes: Tensor
    scale: Tensor
    grid: ForeignGrid
    zero_point: Tensor | None = None
    minimum: Tensor | None = None

    def values(self) -> Tensor:
        """Returns the weight float32 [N, K]."""
        codes = _by_group(self.codes, self.scale).float()
        if self.zero_point is not None:
            codes -= self.zero_point[..., None]
        if self.minimum is not None:
            codes += 2 ** (self.grid.bits - 1)
        codes *= self.scale.float()[..., None]
        if self.minimum is not None:
            codes += self.minimum.float()[..., None]
        return codes.reshape(self.codes.shape)


def unkept(grid: ForeignGrid) -> str:
    """Returns why no `qfx.nn.Linear` can hold codes of this format unchanged; '' if one can."""
    if grid.minimum and not grid.packed:
        return "has a minimum for each group, which only codes of 4 and 5 bits may have"
    if not 2 <= grid.bits <= 8:
        return f"has codes of {grid.bits} bits, and linears have 2 to 8"
    if grid.group % GROUP_MULTIPLE:
        return f"has groups of {grid.group}, and linears have multiples of {GROUP_MULTIPLE}"
    return ""


def scheme_of(grid: ForeignGrid, x: QSpec | None) -> Scheme:
    """Returns the scheme of a linear with weights of this format and activations `x`. Raises
    ValueError if no operator combines them."""
    zeros = grid.zeros or grid.minimum if grid.packed else grid.zeros or grid.signs
    return Scheme(x, QSpec(grid.bits, not zeros, group=grid.group, packed=grid.packed))


def parts_of(weight: ForeignWeight, x: QSpec | None) -> dict[str, Tensor]:
    """Returns the tensors in the state dict of a `qfx.nn.Linear` with exactly the values of
    `weight`. Changes `weight.codes` in place. Raises ValueError for scales that are not finite, and
    NotImplementedError for formats that `unkept` reports."""
    if why := unkept(weight.grid):
        raise NotImplementedError(f"the weight {why}")
    scheme = scheme_of(weight.grid, x)
    if scheme.w.packed:
        return _packed_parts(weight, scheme)
    scale = weight.scale.to(torch.float32, copy=True)
    check_finite(scale, "scale")
    zero = None
    if not scheme.w.symmetric:
        given = weight.zero_point
        zero = torch.zeros_like(scale, dtype=torch.int32) if given is None else given.clone()
        _turn(weight.codes, scale, zero)
    _fill(weight.codes, scale, zero)
    shape = scale.shape[:1] if not scheme.w.grouped else scale.shape
    parts = {"codes": weight.codes, "scale": scale.reshape(shape)}
    return parts | ({} if zero is None else {"zero_point": zero}) | {KEY: scheme_tensor(scheme, {})}


def _packed_parts(weight: ForeignWeight, scheme: Scheme) -> dict[str, Tensor]:
    half = weight.grid.half
    assert half is not None
    parts = {"codes": stream_of(weight.codes, weight.grid.bits), "scale": weight.scale.to(half)}
    if weight.minimum is not None:
        parts["minimum"] = weight.minimum.to(half)
    elif weight.grid.zeros:
        assert weight.zero_point is not None
        parts["zero_point"] = weight.zero_point.to(torch.int8)
    for name in ("scale", "minimum"):
        if name in parts:
            check_finite(parts[name], name)
    return parts | {KEY: scheme_tensor(scheme, parts)}


def _turn(codes: Tensor, scale: Tensor, zero: Tensor) -> None:
    """Makes scales positive without changing values: s (q - z) = -s (~q - ~z), where ~q has as many
    bits as q."""
    flip = -(scale < 0).to(torch.int8)
    _by_group(codes, scale).bitwise_xor_(flip[..., None])
    zero ^= flip.int()
    scale.abs_()


def _fill(codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
    """Replaces scales of 0 by a small number, and their codes by zeros. Some files have such scales
    for groups of zeros, and no operator accepts them."""
    none = scale == 0
    if bool(none.any()):
        if zero is not None:
            zero.masked_fill_(none, 0)
        _by_group(codes, scale).masked_fill_(none[..., None], 0)
        scale.masked_fill_(none, SMALLEST_SCALE)


def _by_group(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns a view [N, G, elements of a group] of `codes` [N, K], for scales [N, G]."""
    return codes.view(*scale.shape, codes.shape[1] // max(scale.shape[1], 1))
