"""Change detection: whether a tensor has changed since it was last checked.

There are three levels. Each detects all that the levels before it detect, and more, and takes
longer:

- A stamp (`stamp_of`, `Snapshot.same_tensors`) is the identity of a tensor, its storage, its
  address and its version. It detects another tensor, other memory (`w.data = ...`) and each write
  that PyTorch counts. It misses uncounted writes: `w.data += d`, numpy. No values are read.
- A sample (`snapshot`, `Snapshot.unchanged`) is stamps and six cache lines of each tensor on the
  CPU (csrc/python/fingerprint.h). It detects uncounted writes to most elements, or to many in a
  third of the rows. It misses writes to a few elements, and all on a GPU. It takes 0.15 us for a
  weight in the caches.
- The content is all values. It misses nothing, and reads the whole tensor: `content_of` is a 64-bit
  hash for this process; `digest_of` (qfx/io/digest.py) is SHA-256, for keys and files that other
  processes read.

In a snapshot, offloaded tensors are represented only by their stamps: a sample would load them. A
place (`place_of`) says which elements of which memory a tensor has, and nothing about their values.
Damage, which is not a change, is found by the checksum of a packed weight
(csrc/cpu/gemm/integrity.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import qfx._C as _C
from qfx.host.tensors import storage_id, version, weak_storage
from qfx.weights.offload import is_offloaded


class Stamp(NamedTuple):
    """A value that stays equal for a tensor while its memory and version do not change and it is
    alive."""

    tensor: int
    storage: int | None
    address: int
    version: int


def stamp_of(tensor: Tensor) -> Stamp:
    return Stamp(id(tensor), storage_id(tensor), tensor.data_ptr(), version(tensor))


class Place(NamedTuple):
    """A value that is equal for tensors with the same elements of one memory, while that memory
    exists."""

    storage: int | None
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def place_of(tensor: Tensor) -> Place:
    where = storage_id(tensor), int(tensor.storage_offset())
    return Place(*where, tensor.shape, tensor.stride(), tensor.dtype)


def place_and_version(tensor: Tensor) -> tuple[Place, int]:
    """Returns a value that is equal for tensors with the same elements that were not written in
    between, as far as PyTorch counts writes."""
    return place_of(tensor), version(tensor)


class Snapshot(Protocol):
    """The state of some arguments of a call, to detect changes later. A snapshot keeps no argument
    alive."""

    def same_tensors(self, arguments: tuple[Any, ...]) -> bool:
        """Whether the stamps of these arguments are those of the snapshot."""

    def unchanged(self, arguments: tuple[Any, ...]) -> bool:
        """Whether the stamps and samples of these arguments are those of the snapshot."""


def snapshot(arguments: tuple[Any, ...], positions: Sequence[int] | None = None) -> Snapshot:
    """Returns the state of the tensors arguments[p] for p in `positions`; by default of all
    arguments."""
    wanted = list(range(len(arguments)) if positions is None else positions)
    offloaded = [p for p in wanted if is_offloaded(arguments[p])]
    if offloaded:
        return _SnapshotOfOffloaded(arguments, [p for p in wanted if p not in offloaded], offloaded)
    return _C.Snapshot(arguments, wanted)


class _SnapshotOfOffloaded:
    """A snapshot in which some of the tensors are offloaded and represented only by their
    stamps."""

    def __init__(
        self, arguments: tuple[Any, ...], sampled: list[int], offloaded: list[int]
    ) -> None:
        self._sampled = _C.Snapshot(arguments, sampled)
        self._stamps = [(p, stamp_of(arguments[p])) for p in offloaded]
        self._storages = [weak_storage(arguments[p]) for p in offloaded]

    def same_tensors(self, arguments: tuple[Any, ...]) -> bool:
        return self._sampled.same_tensors(arguments) and self._same_offloaded(arguments)

    def unchanged(self, arguments: tuple[Any, ...]) -> bool:
        return self._sampled.unchanged(arguments) and self._same_offloaded(arguments)

    def _same_offloaded(self, arguments: tuple[Any, ...]) -> bool:
        if any(p >= len(arguments) or stamp_of(arguments[p]) != was for p, was in self._stamps):
            return False
        return not any(storage.expired() for storage in self._storages)


def content_of(tensor: Tensor) -> int | None:
    """Returns a hash of all values; None for tensors that are not on the CPU, where reading them
    takes more time than the comparison saves."""
    return _C.content(tensor.detach().contiguous()) if tensor.device.type == "cpu" else None
