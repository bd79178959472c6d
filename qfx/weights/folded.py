"""Folded constants: tensors that a graph would compute from its weights at every call. They are
computed once, and again when one of the weights changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.host.tensors import fake_mode_of, is_fake
from qfx.weights.cache import CACHE
from qfx.weights.change_detection import Snapshot, snapshot


class Fold(NamedTuple):
    """A tensor that is computed from arguments of a graph. `arguments`: their positions."""

    arguments: tuple[int, ...]
    compute: Callable[..., Tensor]


class _Known(NamedTuple):
    """Tensors that were computed from the weights of one layer. `of`: the first weight. `epoch`:
    that of the cache of packed weights, which grows when a user says that weights changed."""

    of: weakref.ref[Tensor]
    epoch: int
    before: Snapshot
    tensors: tuple[Tensor, ...]


class FoldedConstants:
    """Computes the folds of a graph from the arguments of its calls. All layers with equal graphs
    share it, each with its own weights."""

    def __init__(self, folds: Sequence[Fold]) -> None:
        self._folds = tuple(folds)
        self._positions = sorted({p for fold in folds for p in fold.arguments})
        self._known: dict[int, _Known] = {}

    def after(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments, followed by the tensor of each fold. A tensor keeps its memory
        when its weights change."""
        if not self._folds:
            return arguments
        first = arguments[self._positions[0]]
        if any(is_fake(arguments[p]) for p in self._positions):
            return (*arguments, *self._computed(arguments))
        known = self._known.get(id(first))
        if known is not None and known.of() is not first:
            known = None
        current = known is not None and known.epoch == CACHE.epoch
        if known is None or not current or not known.before.unchanged(arguments):
            known = self._compute(known, arguments)
        return (*arguments, *known.tensors)

    def _compute(self, known: _Known | None, arguments: tuple[Any, ...]) -> _Known:
        first, epoch = arguments[self._positions[0]], CACHE.epoch
        now, tensors = snapshot(arguments, self._positions), self._computed(arguments)
        if known is not None and _alike(known.tensors, tensors):
            for old, new in zip(known.tensors, tensors, strict=True):
                if not torch.equal(old, new):  # else its packed form stays
                    old.copy_(new)
            tensors = known.tensors
        self._known = {k: v for k, v in self._known.items() if v.of() is not None}
        made = self._known[id(first)] = _Known(weakref.ref(first), epoch, now, tensors)
        return made

    def _computed(self, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.inference_mode(False):
            return tuple(
                fold.compute(*(arguments[p].detach() for p in fold.arguments)).contiguous()
                for fold in self._folds
            )


def _alike(old: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    pairs = zip(old, new, strict=True)
    return all((a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) for a, b in pairs)


def with_examples(folds: Sequence[Fold], examples: Sequence[Any]) -> list[Any]:
    """Returns example inputs of a graph followed by those of its folds, fake where they are."""
    if not folds:
        return list(examples)
    mode = fake_mode_of(examples)
    found = tuple(
        mode.from_tensor(e, static_shapes=True)
        if mode is not None and isinstance(e, Tensor) and not is_fake(e)
        else e
        for e in examples
    )
    made = FoldedConstants(folds).after(found)[len(examples) :]
    return [*examples, *made]
