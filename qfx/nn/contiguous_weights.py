"""make_contiguous: places the packed weights of a model one after another in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qfx.host.tensors import has_values
from qfx.io.huge_pages import Room, are_scattered
from qfx.io.pages import trim
from qfx.nn.loading import StoredModule
from qfx.nn.stored_modules import stored_linears


def make_contiguous(model: nn.Module) -> None:
    """Moves the packed weights of `model` into new memory, one after another, in huge pages if
    available.

    They are placed in the order of the modules, which is approximately the order in which a step
    reads them: processors prefetch memory that is read in order. Weights that are not on the CPU,
    or that processes share, are not moved. Nothing is moved if most weights already lie in order;
    two models that share layers would otherwise take them from each other at each call.

    A buffer `packed` becomes another tensor. The memory is freed when the last of these tensors is.
    """
    owners: dict[int, list[StoredModule]] = {}
    for _, linear in stored_linears(model):
        if _may_move(linear.packed):
            owners.setdefault(id(linear.packed), []).append(linear)
    tensors = [linears[0].packed for linears in owners.values()]
    if not are_scattered(tensors):
        return
    with torch.inference_mode(False), torch.no_grad():  # the model may be trained later
        room = Room.of(t.nbytes for t in tensors)
        while tensors:  # each is freed before the next is copied
            former = tensors.pop(0)
            new = room.empty(former.shape, former.dtype).copy_(former)
            for linear in owners.pop(id(former)):
                linear.repacked(new)
            del former
    trim()


def _may_move(packed: Tensor) -> bool:
    return packed.device.type == "cpu" and has_values(packed) and not packed.is_shared()
