"""Converts a quantized weight to the tensors that are saved for it, and back."""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qfx.host.subclasses import as_parameter
from qfx.nn.frozen import Frozen
from qfx.nn.frozen_state import FrozenState, scheme_tensor, taken_from
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.nn.scheme_tensor import KEY
from qfx.nn.serialized_weight import loaded_values, saved_scales, saved_values
from qfx.ops.storage import packed_values

OPTIONAL = Frozen._fields[1:]


def parts_of(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Returns the tensors that are saved, by name: codes and scales of the packed weight, the other
    tensors that it has, and the scheme."""
    given = zip(OPTIONAL, weight.frozen[1:], strict=True)
    beside = {name: t.detach() for name, t in given if t is not None}
    saved = saved_values(weight.unpacked, weight.scheme)
    return {**saved, **beside, KEY: scheme_tensor(weight.scheme, {**beside, **saved})}


def scheme_part(weight: QuantizedWeight) -> Tensor:
    """Returns the scheme as it is saved, without unpacking codes of 8 bits."""
    beside = dict(zip(OPTIONAL, weight.frozen[1:], strict=True))
    scales = saved_scales(weight.unpacked) if weight.scheme.w.packed else {}
    return scheme_tensor(weight.scheme, {**beside, **scales})


def frozen_of(found: FrozenState, k: int) -> Frozen:
    """Packs a weight with `k` columns from checked tensors, on their device."""
    values = loaded_values(found.tensors, found.scheme, k)
    packed = packed_values(values, found.scheme.w, found.scheme.group)
    return Frozen(packed, *[found.tensors.get(name) for name in OPTIONAL])


def weight_of(found: FrozenState, n: int, k: int, dtype: torch.dtype) -> QuantizedWeight:
    """Returns a weight [N, K] made from checked tensors."""
    return QuantizedWeight.holding(frozen_of(found, k), found.scheme, (n, k), dtype)


def unpickled(
    parts: Mapping[str, Tensor], shape: Any, dtype: torch.dtype, parameter: bool
) -> Tensor:
    """Returns the weight that `torch.save` stored as `parts`. Raises ValueError if the parts do not
    fit each other."""
    n, k = shape
    found = taken_from(parts, "", n, k)
    if found is None:
        raise ValueError("a QuantizedWeight was saved without its codes")
    weight = weight_of(found, n, k, dtype)
    return as_parameter(weight) if parameter else weight


def _pickled(weight: QuantizedWeight) -> Any:
    given = parts_of(weight), tuple(weight.shape), weight.dtype
    return unpickled, (*given, isinstance(weight, torch.nn.Parameter))


copyreg.pickle(QuantizedWeight, _pickled)
torch.serialization.add_safe_globals([unpickled, QuantizedWeight])
