"""A cache of packed weights, which are quantized and packed once, outside the graph.

The key of an entry is the identity of the weight's storage, the view into it, and how the weight is
packed. An entry does not keep the weight alive. An entry is valid for a tensor if it has a snapshot
of the tensor (stamps, and a few cache lines of its memory) from which the tensor does not differ,
or if the whole content of the tensor was compared with what was packed. A changed weight is packed
again in place, so that its address stays. For weights whose float values are offloaded, an equal
stamp is sufficient.
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
from qfx.ops.packing import Packing, expert_parts, parts_of
from qfx.weights.change_detection import Snapshot, content_of, place_of, snapshot, stamp_of
from qfx.weights.offload import is_offloaded, offload
from qfx.weights.recipe_codes import codes_of

log = logging.getLogger(__name__)


class Packed(NamedTuple):
    """A weight as the kernels read it.

    `weight`: int8 (pack_weight). `factor`: float32 [K], multiplies the activation. `columns`:
    float32 [N, O], the columns that stay float. `error`: float32 [2], for the guard of the weight
    (B5).
    """

    weight: Tensor
    factor: Tensor | None = None
    columns: Tensor | None = None
    error: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are not None, in the order of `Packing.parts`."""
        return tuple(tensor for tensor in self if tensor is not None)


def pack(weight: Tensor, view: View, packing: Packing) -> Packed:
    """Quantizes and packs a float weight, which `view` turns into a matrix [N, K], or into the
    matrices [E, N, K] of experts. (R1) (Q1) (Q3)

    Raises ValueError if the codes in `packing` do not belong to this weight.
    """
    with torch.no_grad():
        w_nk, device = apply(view, weight.detach()), str(weight.device)
        rounding = packing.rounding
        codes = None if rounding is None else codes_of(w_nk, packing, rounding)
        if w_nk.ndim == 3:
            return Packed(**expert_parts(w_nk, w_nk.shape[0], packing, w_nk.shape[2], codes))
        given = {n: c._replace(device=device).tensor() for n, c in packing.constants().items()}
        if codes is not None:
            given["codes"] = codes
        return Packed(**parts_of(w_nk, packing, given, w_nk.shape[1]))


def _in_storage(weight: Tensor) -> tuple[Any, ...]:
    """Returns which elements of its storage a tensor has. Offloading moves a tensor to another
    storage."""
    return place_of(weight)[1:]


_SHARING = 8  # tensors of one storage and shape whose snapshots an entry keeps


class _CachedWeight:
    """A packed weight, with snapshots of the tensors that it was packed from."""

    def __init__(self, packed: Packed, content: int | None) -> None:
        self.packed, self.content = packed, content
        self._known: deque[Snapshot] = deque(maxlen=_SHARING)

    def knows(self, weight: Tensor) -> bool:
        """Whether this tensor had the packed content and has not changed since."""
        return any(known.unchanged((weight,)) for known in self._known)

    def learn(self, now: Snapshot) -> None:
        self._known.append(now)

    def forget(self) -> None:
        """Discards the snapshots. From now on only a comparison of the whole content shows whether
        the entry is valid for a tensor."""
        self._known.clear()


class Cache:
    """Maps a weight and its packing to a Packed. Thread-safe; removes entries when their storage is
    freed."""

    def __init__(self) -> None:
        self.generation = 0  # grows whenever an entry may have become wrong
        self.epoch = 0  # grows with every optimizer step and `invalidate`
        self.packs = 0  # how many times a weight was packed
        self._lock = threading.Lock()
        self._owners: dict[int, tuple[Any, dict[Any, _CachedWeight]]] = {}

    def get(self, weight: Tensor, view: View, packing: Packing) -> Packed:
        """Returns the packed weight for the current value of `weight`. Raises RuntimeError if the
        memory of `weight` was freed."""
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
        """Makes the next `get` of each weight compare its whole content with what is packed.
        Offloaded weights are excluded, because the comparison would load their values."""
        with self._lock:
            self._forget([weight for weight in weights if not is_offloaded(weight)])

    def offload_weight(self, weight: Tensor) -> bool:
        """Frees the memory of a weight's float values by offloading them to a file, if they have
        not changed since they were packed. The packed weight stays in memory. Returns whether
        memory was freed. Raises OSError as `qfx.weights.offload.offload` does."""
        with self._lock:
            was, was_offloaded = stamp_of(weight), is_offloaded(weight)
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
            return not was_offloaded or now.address != was.address

    def _forget(self, weights: Iterable[Tensor] | None) -> bool:
        """Discards snapshots of these weights, or of all; returns whether there was an entry."""
        keys = self._owners if weights is None else [storage_id(w) for w in weights]
        touched = [e for c in keys if c in self._owners for e in self._owners[c][1].values()]
        for entry in touched:
            entry.forget()
        return bool(touched)

    def _pack(self, weight: Tensor, view: View, packing: Packing) -> Packed:
        self.packs += 1
        with torch.inference_mode(False):  # the tensors may later be updated in place
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
        """Removes the entries of freed storages. A weak reference keeps the identity of a storage
        from reuse."""
        for cdata in [c for c, (ref, _) in self._owners.items() if ref.expired()]:
            del self._owners[cdata]

    def invalidate(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Declares that these tensors, or all, may have changed: each is compared with its packed
        weight before the next use."""
        with self._lock:
            self.generation += self._forget(tensors)
            self.epoch += 1

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Context manager that removes at its end the entries that were created inside the `with`
        block."""
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
    """Declares that weights changed without PyTorch noticing, so that they are packed again.

        weight.data.view(-1)[:4] = 0
        qfx.invalidate(weight)

    Every packed weight on the CPU is also compared with its checksum before its next use: an
    operator raises RuntimeError for one that was damaged in memory.

    `target`: a module, a tensor, or None for all weights. It is only necessary after a write to a
    part of a weight that does not increase the version counter: to a few elements through `.data`
    or numpy, or any such write on a GPU. In-place operations, optimizer steps, `load_state_dict`,
    `.data = ...` and, on the CPU, `.data.mul_(2)` or a merged adapter are detected without it:
    docs/architecture.md.
    """
    _C.read_packed_again()
    if isinstance(target, nn.Module):
        CACHE.invalidate([*target.parameters(), *target.buffers()])
    else:
        CACHE.invalidate(None if target is None else [target])


after_each_step(CACHE.invalidate)
