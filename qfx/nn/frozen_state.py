"""The tensors that a state dict contains for one `qfx.nn.Linear`, and the checks of these tensors.

Scheme, codes and scales must come from the same weight: codes with another scheme, or with the
scales of other codes, are a different weight, and most such mistakes have the right shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.host.tensors import has_values
from qfx.nn.scheme_tensor import KEY, fields_of, of_earlier, read, scheme_of, written
from qfx.nn.serialized_weight import SAVED, saved_kinds
from qfx.nn.state_checks import Kind, State, check_finite, check_parts, check_positive, check_range
from qfx.ops.quantize import code_range
from qfx.values.scheme import PER_COLUMN, PER_ROW, QSpec, Scheme

TENSORS = (*SAVED, "factor", "x_scale", "x_zero_point", "shift")
PARTS = (KEY, *TENSORS)


class FrozenState(NamedTuple):
    """A scheme, and the tensors that it needs, by their names in TENSORS. Both were checked by
    `taken_from`."""

    scheme: Scheme
    tensors: Mapping[str, Tensor]

    @property
    def token(self) -> str:
        """The scheme as a string."""
        return str(self.scheme)


def scheme_tensor(scheme: Scheme, tensors: Mapping[str, Tensor | None]) -> Tensor:
    names = ("factor", "x_zero_point", "shift", "minimum")
    optional = {name: tensors.get(name) is not None for name in names}
    scale = tensors.get("scale")
    half = scale.dtype if scheme.w.packed and scale is not None else None
    return written("Linear", fields_of(scheme) | optional | {"half": half})


def taken_from(state: State, prefix: str, n: int, k: int) -> FrozenState | None:
    """Returns the checked state of a weight [N, K]; None if the state dict contains none of its
    tensors.

    Raises ValueError, before anything is changed, if the tensors do not fit each other or the
    module, or have values that quantization cannot produce.
    """
    parts = {name: state[prefix + name] for name in PARTS if prefix + name in state}
    if not parts:
        return None
    if KEY not in parts:
        raise ValueError(of_earlier(prefix, " and ".join(prefix + name for name in parts)))
    fields = read(parts.pop(KEY), prefix + KEY, "Linear")
    scheme = scheme_of(fields, prefix + KEY)
    if fault := _fault(scheme, fields, k):
        raise ValueError(f"{prefix}{KEY}: {scheme} {fault}")
    wanted = kinds(scheme, fields, n, k)
    check_parts(parts, prefix, TENSORS, wanted, f"{prefix}{KEY} says {scheme}")
    _check_values(parts, prefix, scheme)
    return FrozenState(scheme, parts)


def _fault(scheme: Scheme, fields: Mapping[str, Any], k: int) -> str | None:
    x = scheme.x
    if scheme.at(k) != scheme:
        return f"rotates blocks of {scheme.rotation}, for which K={k} is too small"
    if PER_COLUMN in (scheme.w.axes, x and x.axes) and not fields["factor"]:
        return "needs a factor"
    if fields["x_zero_point"] and (x is None or not x.static or x.symmetric):
        return "has no static zero point"
    if fields["minimum"] and (scheme.w.symmetric or not scheme.w.packed):
        return "has no minimum"
    if fields["half"] != torch.bfloat16 and not scheme.w.packed:
        return "has its scales in float32"
    return None


def kinds(scheme: Scheme, fields: Mapping[str, Any], n: int, k: int) -> dict[str, Kind]:
    """Returns the dtype and shape of each tensor that is saved, by name."""
    found = saved_kinds(scheme, n, k, bool(fields["minimum"]), fields["half"])
    if fields["factor"]:
        found["factor"] = (torch.float32, (k,))
    if scheme.calibrated:
        found["x_scale"] = (torch.float32, (1,))
    if fields["x_zero_point"]:
        found["x_zero_point"] = (torch.int32, (1,))
    if fields["shift"]:
        found["shift"] = (torch.float32, (k,))
    return found


def _limits(name: str, spec: QSpec) -> tuple[int, int]:
    """Returns the smallest and the largest integer that the saved tensor `name` may contain. Codes
    of weights that other tools wrote may be `-2^(bits - 1)` even without a zero point: the sums are
    exact (G1)."""
    return code_range(spec.bits, spec.symmetric and name != "codes")


def _check_values(tensors: Mapping[str, Tensor], prefix: str, scheme: Scheme) -> None:
    finite = ["shift", "minimum", *(["scale"] if scheme.w.packed else [])]
    for name in ("scale", "factor", "x_scale", "shift", "minimum"):
        if name in tensors:
            check = check_finite if name in finite else check_positive
            check(tensors[name], prefix + name)
    specs: dict[str, QSpec | None] = {"x_zero_point": scheme.x}
    if not scheme.w.packed:  # any bits of a packed weight are valid codes
        specs |= {"codes": scheme.w, "zero_point": scheme.w}
    elif "zero_point" in tensors:
        check_range(tensors["zero_point"], f"{prefix}zero_point", *code_range(scheme.w.bits, False))
    for name, spec in specs.items():
        if name in tensors and spec is not None:
            check_range(tensors[name], prefix + name, *_limits(name, spec))
    scale = tensors["scale"]
    one = scheme.w.axes != PER_ROW and scale.numel() > 0 and has_values(scale)
    if one and (scale != scale[0]).any():
        raise ValueError(f"{prefix}scale differs from row to row, and {scheme} has one for all")
