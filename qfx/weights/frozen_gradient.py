"""frozen_gradient: the gradient of the input of a linear whose weight does not train, in int8,
which keeps the transposed weight for the next step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import qfx._C as _C
from qfx.host.tensors import WeakStorage, weak_storage
from qfx.ops.int8_gradients import TurnedPart, gradient_product, turned_weight
from qfx.ops.registry import fake, in_python, no_gradient
from qfx.weights.change_detection import Snapshot, place_of, snapshot


class _Kept(NamedTuple):
    """A packed weight that was turned: its storage, and its state at that time."""

    storage: WeakStorage
    of: Snapshot
    parts: list[TurnedPart]


_LOCK = threading.Lock()
_KEPT: dict[Any, _Kept] = {}


@in_python(
    "(Tensor grad, Tensor weight, SymInt[] layout, SymInt k, Tensor seed, ScalarType dtype) "
    "-> Tensor"
)
def frozen_gradient(
    grad: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    k: int,
    seed: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Computes grad [M, N] times a packed weight [N, k], in int8 on stochastically rounded
    gradients: [M, k]. `seed` int64 [1]. Equation (T3).

    The transposed codes, a byte for each element, are kept until the weight changes or is freed.
    """
    return gradient_product(grad, _turned(weight, list(layout), k), k, seed, dtype)


@fake("frozen_gradient")
def _(
    grad: Tensor, weight: Tensor, layout: Sequence[int], k: int, seed: Tensor, dtype: torch.dtype
) -> Tensor:
    return grad.new_empty(grad.shape[0], k, dtype=dtype)


@register_flop_formula(torch.ops.qfx.frozen_gradient, get_raw=True)
def _flops(grad: Tensor, weight: Tensor, layout: Sequence[int], k: int, *_: Any, **__: Any) -> int:
    return 2 * grad.numel() * k


no_gradient("frozen_gradient")


def _turned(weight: Tensor, layout: list[int], k: int) -> list[TurnedPart]:
    """Returns the parts of a weight, kept from an earlier call if it has not changed. Steps of an
    optimizer do not count as changes, since none trains a packed weight."""
    key = place_of(weight), (*layout, k), _C.isa()
    with _LOCK:
        kept = _KEPT.get(key)
    if kept is not None and not kept.storage.expired() and kept.of.unchanged((weight,)):
        return kept.parts
    kept = _Kept(weak_storage(weight), snapshot((weight,)), turned_weight(weight, layout, k))
    with _LOCK:
        for freed in [each for each, it in _KEPT.items() if it.storage.expired()]:
            del _KEPT[freed]
        _KEPT[key] = kept
    return kept.parts
