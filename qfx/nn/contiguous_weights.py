"""packed_together: the packed weights of a model, one behind the other in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qfx.host.tensors import has_values
from qfx.io.pages import trim
from qfx.nn.loading import StoredModule
from qfx.nn.stored_modules import stored_linears
from qfx.weights.huge_pages import Room, are_scattered


def make_contiguous(model: nn.Module) -> None:
    """Moves them into new memory, in huge pages where the system has them, in the order of the
    modules, which is about that in which a step reads them: a processor fetches what lies in order
    before it is asked for. Those that are not on the CPU, or that processes share, stay where
    they are; so do all where most lie so already, as of two models that share layers, which
    would else take them from each other.

    A buffer `packed` becomes another tensor. The memory goes when the last of them does.
    """
    owners: dict[int, list[StoredModule]] = {}
    for _, linear in stored_linears(model):
        if _may_move(linear.packed):
            owners.setdefault(id(linear.packed), []).append(linear)
    tensors = [linears[0].packed for linears in owners.values()]
    if not are_scattered(tensors):
        return
    with torch.inference_mode(False), torch.no_grad():  # whoever generates first may train later
        room = Room.of(t.nbytes for t in tensors)
        while tensors:  # of which each is freed before the next is copied
            former = tensors.pop(0)
            new = room.empty(former.shape, former.dtype).copy_(former)
            for linear in owners.pop(id(former)):
                linear.repacked(new)
            del former
    trim()


def _may_move(packed: Tensor) -> bool:
    return packed.device.type == "cpu" and has_values(packed) and not packed.is_shared()
