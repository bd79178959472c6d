"""Batches: how each is given to a model, and which of them are for what."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

_HELD = 4  # of so many batches one is for predictions
_MOST = 8  # of these


@dataclass(frozen=True)
class BatchSlice:
    """Those from `start` to before `stop`, each time that they are read."""

    batches: Iterable[Any]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batches), self.start, self.stop)


@dataclass(frozen=True)
class Transformed:
    """Each batch as `transform` gives it, each time that they are read."""

    batches: Iterable[Any]
    transform: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self.transform, self.batches)


def parted(batches: Iterable[Any], count: int) -> tuple[BatchSlice, BatchSlice]:
    """The batches that weights are rounded on, and the last quarter, that predictions are made on:
    of `count` at least one, which of a single batch is the same, and at most 8."""
    at = count - min(max(count // _HELD, 1), _MOST)
    return BatchSlice(batches, 0, at or count), BatchSlice(batches, at, count)


def arguments_of(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What the model is called with."""
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, list | tuple) else (batch,)), {}


def check_call(model: Any, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raises ValueError where the forward of `model` does not take so many or such arguments."""
    try:
        takes = inspect.signature(getattr(model, "forward", model))
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        takes.bind(*inputs, **keywords)
    except TypeError as why:
        what = f"a mapping of {', '.join(keywords)}" if keywords else f"a tuple of {len(inputs)}"
        raise ValueError(
            f"calibrate: a batch is {what}, with which the model cannot be called, {why}; give "
            "transform, which takes a batch and returns the model's inputs: "
            f"transform=lambda batch: {'batch[name]' if keywords else 'batch[0]'}"
        ) from None
