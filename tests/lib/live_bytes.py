"""Counts the bytes of the tensors that a function makes and that are alive at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.alive = {key: each for key, each in self.alive.items() if not each[0].expired()}
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and id_of(t) not in given:
                storage = t.untyped_storage()
                self.alive[id_of(t)] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def most_bytes(function: Callable[[], Any]) -> int:
    """Returns the maximum during the call, without what operators allocate internally."""
    torch.zeros(())  # allocates what the first tensor of a process needs
    with _Watching() as watching:
        function()
    return watching.most
