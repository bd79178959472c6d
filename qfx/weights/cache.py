"""Packed weights: quantized and packed once, outside the graph; never stale, never a leak.

An entry belongs to a storage and holds no reference to the weight: it is keyed on the identity of
the storage, the view into it, and how it is packed. It is valid for the tensors whose snapshots it
has (stamps, and a few cache lines of their memory), and for any other whose whole content it has
compared with what was packed. What changed is packed again in place, so its address stays. Weights
whose float values were given back are trusted by their stamps.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import qfx._C as _C
from qfx.graph.views import View, apply
from qfx.host.optimizers import after_each_step
from qfx.host.tensors import is_fake, storage_id, weak_storage
from qfx.ops.packing import Packing, parts_of
from qfx.weights.change_detection import Snapshot, content_of, place_of, snapshot, stamp_of
from qfx.weights.offload import is_offloaded, offload
from qfx.weights.recipe_codes import codes_of

log = logging.getLogger(__name__)


class Packed(NamedTuple):
    """A weight as the kernels read it: `weight` int8 (pack_weight); `factor` float32 [K] for the
    activation, `columns` float32 [N, O] those that stay float, `error` float32 [2] for its guard
    (B5)."""

    weight: Tensor
    factor: Tensor | None = None
    columns: Tensor | None = None
    error: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are there, in the order of `Packing.parts`."""
        return tuple(tensor for tensor in self if tensor is not None)


def pack(weight: Tensor, view: View, packing: Packing) -> Packed:
    """Quantizes and packs a float weight, which `view` makes a matrix [N, K]. (R1) (Q1) (Q3)

    Raises ValueError for a weight that the codes of `packing` do not belong to.
    """
    with torch.no_grad():
        w_nk, device = apply(view, weight.detach()), str(weight.device)
        given = {n: c._replace(device=device).tensor() for n, c in packing.constants().items()}
        if packing.rounding is not None:
            given["codes"] = codes_of(w_nk, packing, packing.rounding)
        return Packed(**parts_of(w_nk, packing, given, w_nk.shape[1]))


def _in_storage(weight: Tensor) -> tuple[Any, ...]:
    """Which elements of its storage it is: what is given back moves to another one."""
    return place_of(weight)[1:]


_SHARING = 8  # tensors of one storage and shape that an entry knows by their stamps


class _CachedWeight:
    """A packed weight, and what it was packed from."""

    def __init__(self, packed: Packed, content: int | None) -> None:
        self.packed, self.content = packed, content
        self._known: deque[Snapshot] = deque(maxlen=_SHARING)

    def knows(self, weight: Tensor) -> bool:
        """Whether this tensor had the packed content and has not changed since."""
        return any(known.unchanged((weight,)) for known in self._known)

    def learn(self, now: Snapshot) -> None:
        self._known.append(now)

    def forget(self) -> None:
        """From now on only a comparison of the content tells whether this is still right."""
        self._known.clear()


class Cache:
    """(weight, how it is packed) -> Packed. Thread-safe; forgets a weight when its storage dies."""

    def __init__(self) -> None:
        self.generation = 0  # grows whenever an entry may have become wrong
        self.epoch = 0  # grows with every optimizer step and `invalidate`
        self.packs = 0  # how many times a weight was packed
        self._lock = threading.Lock()
        self._owners: dict[int, tuple[Any, dict[Any, _CachedWeight]]] = {}

    def get(self, weight: Tensor, view: View, packing: Packing) -> Packed:
        """The packed weight, valid for the weight's value now."""
        if is_fake(weight):
            with weight.fake_mode:
                return pack(weight, view, packing)
        if (
            weight.device.type != "meta"
            and weight.numel()
            and weight.untyped_storage().nbytes() == 0
        ):
            raise RuntimeError(
                f"a weight of shape {list(weight.shape)} has no storage: it was freed"
            )
        with self._lock:
            entries, key = self._entries(weight), (*_in_storage(weight), view, packing)
            entry = entries.get(key)
            if entry is None or not entry.knows(weight):
                entry = entries[key] = self._up_to_date(entry, weight, view, packing)
            return entry.packed

    def _up_to_date(
        self, entry: _CachedWeight | None, weight: Tensor, view: View, packing: Packing
    ) -> _CachedWeight:
        now, content = snapshot((weight,)), content_of(weight)  # before it is packed
        if entry is None:
            entry = _CachedWeight(self._pack(weight, view, packing), content)
        elif content is None or content != entry.content:
            again = self._pack(weight, view, packing)
            for old, new in zip(entry.packed.tensors, again.tensors, strict=True):
                old.copy_(new)
            entry.content = content
            entry.forget()  # the other tensors that share this memory
        entry.learn(now)
        return entry

    def distrust(self, weights: Iterable[Tensor]) -> None:
        """The next `get` of each compares its whole content with what is packed; not of those whose
        values were given back, which it would fetch."""
        with self._lock:
            self._forget([weight for weight in weights if not is_offloaded(weight)])

    def give_back(self, weight: Tensor) -> bool:
        """Gives back the float values of a packed weight that has not changed since, and what it is
        packed to stays; whether that is new. Raises OSError as `qfx.weights.offload.give_back`."""
        with self._lock:
            was, was_held = stamp_of(weight), is_offloaded(weight)
            current = [e for e in self._entries(weight).values() if e.knows(weight)]
            if why_not := offload(weight) if current else "it has changed":
                log.info("a weight %s stays in memory: %s", list(weight.shape), why_not)
                return False
            now = stamp_of(weight)
            if now.storage != was.storage:
                assert was.storage is not None and now.storage is not None
                moved = self._owners.pop(was.storage)[1]
                self._owners[now.storage] = (weak_storage(weight), moved)
            for entry in current:
                entry.forget()
                entry.learn(snapshot((weight,)))
            return not was_held or now.address != was.address

    def _forget(self, weights: Iterable[Tensor] | None) -> bool:
        """Whether there was an entry to forget about."""
        keys = self._owners if weights is None else [storage_id(w) for w in weights]
        touched = [e for c in keys if c in self._owners for e in self._owners[c][1].values()]
        for entry in touched:
            entry.forget()
        return bool(touched)

    def _pack(self, weight: Tensor, view: View, packing: Packing) -> Packed:
        self.packs += 1
        with torch.inference_mode(False):  # the buffers must take part in later in-place refreshes
            return pack(weight, view, packing)

    def _entries(self, weight: Tensor) -> dict[Any, _CachedWeight]:
        key = storage_id(weight)
        assert key is not None
        owner = self._owners.get(key)
        if owner is None:
            self._sweep()
            owner = self._owners[key] = (weak_storage(weight), {})
        return owner[1]

    def _sweep(self) -> None:
        """Drops what belonged to dead storages. A weak reference keeps their identity unused."""
        for cdata in [c for c, (ref, _) in self._owners.items() if ref.expired()]:
            del self._owners[cdata]

    def invalidate(self, tensors: Iterable[Tensor] | None = None) -> None:
        """These tensors, or all, may have changed."""
        with self._lock:
            self.generation += self._forget(tensors)
            self.epoch += 1

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """A context that forgets behind it what was packed for the first time inside."""
        with self._lock:
            before = {key: {*entries} for key, (_, entries) in self._owners.items()}
        try:
            yield
        finally:
            with self._lock:
                for key, (_, entries) in self._owners.items():
                    for new in entries.keys() - before.get(key, set()):
                        del entries[new]

    def __len__(self) -> int:
        with self._lock:
            self._sweep()
            return sum(len(entries) for _, entries in self._owners.values())


CACHE = Cache()


def invalidate(target: nn.Module | Tensor | None = None) -> None:
    """Tells qfx that weights changed behind PyTorch's back, so that they are packed anew.

    Every packed weight on the CPU is also compared with its checksum before its next use: an
    operator raises RuntimeError for one that was damaged in memory.

    `target`: a module, a tensor, or None for all weights. Needed only after a write that bumps no
    version counter, to a part of a weight: a few elements through `.data` or numpy, or anything of
    that kind on a GPU. In-place operations, optimizer steps, `load_state_dict`, `.data = ...` and,
    on the CPU, `.data.mul_(2)` or a merged adapter are noticed without it: docs/architecture.md.
    """
    _C.read_packed_again()
    if isinstance(target, nn.Module):
        CACHE.invalidate([*target.parameters(), *target.buffers()])
    else:
        CACHE.invalidate(None if target is None else [target])


after_each_step(CACHE.invalidate)
