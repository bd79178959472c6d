"""Packed weights: quantized and packed once, outside the graph; never stale, never a leak.

An entry belongs to a storage and holds no reference to the weight: it is keyed on the identity of
the storage, the view into it, and how it is packed, and is valid for one (version, address) of it.
Optimizer steps and `invalidate` mark entries stale, because fused optimizers and `.data` writes do
not bump a tensor's version. A stale entry is refreshed in place, so its address stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from qfx.packing import Packing, parts_of
from qfx.views import View, apply


class Packed(NamedTuple):
    """A weight as the kernels read it: `blocks` int8 (pack_weight), `scale` float32 [N], or [N, G]
    with groups or zero points, `zero_point` int32 [N, G], `factor` float32 [K] for the activation,
    `columns` float32 [N, O] those that stay float, `error` float32 [2] for its guard (B5).
    """

    blocks: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    factor: Tensor | None = None
    columns: Tensor | None = None
    error: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are there, in the order of `Packing.parts`."""
        return tuple(tensor for tensor in self if tensor is not None)


def pack(weight: Tensor, view: View, packing: Packing) -> Packed:
    """Quantizes and packs a float weight, which `view` makes a matrix [N, K]. (R1) (Q1) (Q3)"""
    with torch.no_grad():
        w_nk, device = apply(view, weight.detach()), str(weight.device)
        given = {n: c._replace(device=device).tensor() for n, c in packing.constants().items()}
        parts = parts_of(w_nk, packing, given, w_nk.shape[1])
        return Packed(**{n: t.contiguous() if t.dim() == 1 else t for n, t in parts.items()})


class Stamp(NamedTuple):
    """What tells two states of a weight apart without reading it.

    `tensor` is its identity: two parameters may share memory and count versions apart.
    """

    tensor: int
    storage: int
    address: int
    version: int


def stamp(weight: Tensor) -> Stamp:
    version = 0 if weight.is_inference() else weight._version
    return Stamp(id(weight), weight.untyped_storage()._cdata, weight.data_ptr(), version)


@dataclass
class _Entry:
    stamp: Stamp
    packed: Packed
    stale: bool = False


class Cache:
    """(weight, how it is packed) -> Packed. Thread-safe; forgets a weight when its storage dies."""

    def __init__(self) -> None:
        self.generation = 0  # grows whenever an entry is marked stale
        self.epoch = 0  # grows with every optimizer step and `invalidate`
        self.packs = 0  # how many times a weight was packed
        self._lock = threading.Lock()
        self._owners: dict[int, tuple[StorageWeakRef, dict[Any, _Entry]]] = {}

    def get(self, weight: Tensor, view: View, packing: Packing) -> Packed:
        """The packed weight, valid for the weight's value now."""
        if isinstance(weight, FakeTensor):
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
        now = stamp(weight)
        place = (weight.storage_offset(), weight.shape, weight.stride(), weight.dtype)
        key = (*place, view, packing)
        with self._lock:
            entries = self._entries(weight)
            entry = entries.get(key)
            if entry is None:
                entry = entries[key] = _Entry(now, self._pack(weight, view, packing))
            elif entry.stale or entry.stamp != now:
                again = self._pack(weight, view, packing)
                for old, new in zip(entry.packed.tensors, again.tensors, strict=True):
                    old.copy_(new)
                entry.stamp, entry.stale = now, False
            return entry.packed

    def _pack(self, weight: Tensor, view: View, packing: Packing) -> Packed:
        self.packs += 1
        with torch.inference_mode(False):  # the buffers must take part in later in-place refreshes
            return pack(weight, view, packing)

    def _entries(self, weight: Tensor) -> dict[Any, _Entry]:
        storage = weight.untyped_storage()
        owner = self._owners.get(storage._cdata)
        if owner is None:
            self._sweep()
            owner = self._owners[storage._cdata] = (StorageWeakRef(storage), {})
        return owner[1]

    def _sweep(self) -> None:
        """Drops what belonged to dead storages. A weak reference keeps their identity unused."""
        for cdata in [c for c, (ref, _) in self._owners.items() if ref.expired()]:
            del self._owners[cdata]

    def invalidate(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Marks the entries of these tensors stale, or all."""
        with self._lock:
            keys = self._owners if tensors is None else [_storage(t) for t in tensors]
            touched = [e for c in keys if c in self._owners for e in self._owners[c][1].values()]
            for entry in touched:
                entry.stale = True
            self.generation += bool(touched)
            self.epoch += 1

    def __len__(self) -> int:
        with self._lock:
            self._sweep()
            return sum(len(entries) for _, entries in self._owners.values())


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # a tensor subclass without a storage is never cached
        return None


CACHE = Cache()


class Memo:
    """What a module derives from tensors of its own, derived anew when one may have changed.

    A copy of it is empty: what a copied module derives belongs to the copy's tensors.
    """

    def __init__(self) -> None:
        self._pins: Any = None  # no other tensor or storage gets the identity of those in the key
        self._key: Any = None
        self._value: Any = None

    def get(self, tensors: tuple[Tensor, ...], derive: Callable[[], Any]) -> Any:
        """`derive()`, or what it returned for the same values of `tensors`."""
        if torch.compiler.is_compiling() or any(isinstance(t, FakeTensor) for t in tensors):
            return derive()
        key = (CACHE.epoch, *map(stamp, tensors))
        if key != self._key:
            self._value = derive()
            self._pins = (tensors, [StorageWeakRef(t.untyped_storage()) for t in tensors])
            self._key = key
        return self._value

    def __reduce__(self) -> Any:
        return Memo, ()


def invalidate(target: nn.Module | Tensor | None = None) -> None:
    """Tells qfx that weights changed behind PyTorch's back, so that they are packed anew.

    `target`: a module, a tensor, or None for all weights. Only needed after writes that bump no
    version counter: `w.data.mul_(2)`, or numpy writing into the weight's memory. Optimizer steps,
    `load_state_dict`, in-place operations and `.data = ...` are noticed without it.
    """
    if isinstance(target, nn.Module):
        CACHE.invalidate([*target.parameters(), *target.buffers()])
    else:
        CACHE.invalidate(None if target is None else [target])


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Fused optimizers change weights without bumping versions."""
    CACHE.invalidate(_parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return (p for p in parameters if p.requires_grad or p.grad is not None)


register_optimizer_step_post_hook(_stepped)
