"""Ways in which a weight becomes half of what it was, between two calls of a model.

With and without a version that says so, in its memory or in another's place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.fuzz.held import found


def _in_place(module: nn.Module, name: str, half: Tensor) -> None:
    found(module, name).mul_(0.5)


def _behind(module: nn.Module, name: str, half: Tensor) -> None:
    """What merging an adapter does."""
    found(module, name).data -= half


def _memory(module: nn.Module, name: str, half: Tensor) -> None:
    """What numpy, or a flat buffer of which the weight is a view, does."""
    weight = found(module, name)
    bytes_of = torch.empty(0, dtype=torch.uint8).set_(weight.untyped_storage())
    like = torch.empty(0, dtype=weight.dtype).set_(weight.untyped_storage())
    bytes_of.copy_((like * 0.5).view(torch.uint8))


def _replaced(module: nn.Module, name: str, half: Tensor) -> None:
    found(module, name).data = half


def _loaded(module: nn.Module, name: str, half: Tensor) -> None:
    module.load_state_dict({**module.state_dict(), name: half})


def _assigned(module: nn.Module, name: str, half: Tensor) -> None:
    module.load_state_dict({**module.state_dict(), name: half}, assign=True)


CHANGES: dict[str, Callable[[nn.Module, str, Tensor], None]] = {
    "in_place": _in_place,
    "behind": _behind,
    "memory": _memory,
    "replaced": _replaced,
    "loaded": _loaded,
    "assigned": _assigned,
}


def halve(module: nn.Module, name: str, change: str) -> None:
    """The parameter or buffer of this path, in the way that `CHANGES` has for `change`."""
    CHANGES[change](module, name, found(module, name).detach() * 0.5)
