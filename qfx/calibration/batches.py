"""Batches: how each is given to a model, and which of them are for what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

_HELD = 4  # of so many batches one is for predictions
_MOST = 8  # of these


@dataclass(frozen=True)
class Part:
    """Those from `start` to before `stop`, each time that they are read."""

    batches: Iterable[Any]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batches), self.start, self.stop)


def parted(batches: Iterable[Any], count: int) -> tuple[Part, Part]:
    """The batches that weights are rounded on, and the last quarter, that predictions are made on:
    of `count` at least one, which of a single batch is the same, and at most 8."""
    at = count - min(max(count // _HELD, 1), _MOST)
    return Part(batches, 0, at or count), Part(batches, at, count)


def arguments_of(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What the model is called with."""
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, list | tuple) else (batch,)), {}
