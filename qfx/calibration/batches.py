"""Batches of calibration inputs: how they are split and how each is passed to a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

_ONE_OF = 4  # one batch of this many is used for predictions
_MOST = 8  # at most this many batches are used for predictions


@dataclass(frozen=True)
class BatchSlice:
    """The batches from index `start` up to but not including `stop`. Each iteration reads `batches`
    anew."""

    batches: Iterable[Any]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batches), self.start, self.stop)


@dataclass(frozen=True)
class Transformed:
    """The results of `transform` for each batch, computed again at each iteration."""

    batches: Iterable[Any]
    transform: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self.transform, self.batches)


def parted(batches: Iterable[Any], count: int) -> tuple[BatchSlice, BatchSlice]:
    """Splits the batches: returns those on which weights are rounded, and those on which
    divergences are predicted.

    Predictions use the last quarter of the `count` batches: at least one and at most 8. A single
    batch is used for both.
    """
    at = count - min(max(count // _ONE_OF, 1), _MOST)
    return BatchSlice(batches, 0, at or count), BatchSlice(batches, at, count)


def arguments_of(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns the positional and the keyword arguments with which the model is called for
    `batch`."""
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, list | tuple) else (batch,)), {}


def check_call(model: Any, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raises ValueError if the forward of `model` cannot be called with these arguments."""
    try:
        takes = inspect.signature(getattr(model, "forward", model))
    except (TypeError, ValueError):  # a builtin has no signature
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
