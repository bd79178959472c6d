"""The classes of linears, embeddings and products of experts that store quantized weights, and the
class to which a saved scheme belongs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn

from qfx.nn.conv_like import is_convolution, why_no_windows
from qfx.nn.embedding import Embedding
from qfx.nn.linear import Linear
from qfx.nn.linear_like import is_embedding, is_linear
from qfx.nn.loading import StoredModule
from qfx.nn.lora_modules import fuse_adapters
from qfx.nn.modules_to_save import watch_wrappers
from qfx.nn.scheme_tensor import read_any
from qfx.nn.sign_linear import SignLinear
from qfx.nn.stacked_weight import StackedWeight

Stored = StoredModule | StackedWeight  # a module whose weights are saved as codes
StoredKind = type[StoredModule] | type[StackedWeight]
STORED: tuple[type[StoredModule], ...] = (Linear, SignLinear, Embedding)
NAMES: dict[Any, str] = {
    Linear: "an int8 linear",
    SignLinear: "a linear of one bit",
    Embedding: "an int8 embedding",
    StackedWeight: "a product of int8 experts",
}
# Functions that are called with each model in which such modules were created or loaded.
LISTENERS: list[Callable[[nn.Module], None]] = [watch_wrappers, fuse_adapters]


def notify_listeners(model: nn.Module) -> None:
    """Calls all LISTENERS with `model`. Code that creates, converts or loads such modules calls
    this."""
    for listener in LISTENERS:
        listener(model)


def stored_linears(model: nn.Module) -> Iterator[tuple[str, StoredModule]]:
    """Yields each quantized module of `model` with its name; a shared module once for each of its
    names."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, StoredModule) and module.is_quantized:
            yield name, module


def stored_weights(model: nn.Module) -> Iterator[tuple[str, Stored]]:
    """Yields what `stored_linears` does, and each product of int8 experts."""
    yield from stored_linears(model)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, StackedWeight):
            yield name, module


def replaces(kind: StoredKind, module: nn.Module) -> bool:
    """Whether a module of the class `kind` can replace the float module `module`. Products of
    experts replace no module but a parameter. The weight of a convolution is saved as that of a
    linear is."""
    if issubclass(kind, StackedWeight):
        return False
    if is_convolution(module):
        return issubclass(kind, Linear) and not why_no_windows(module)
    return is_embedding(module) if issubclass(kind, Embedding) else is_linear(module)


def kind_of(owner: str, names: Collection[str]) -> type[StoredModule] | None:
    """Returns the class of the quantized module `owner` of a state dict with the keys `names`,
    found by the key of its codes; None if there are no codes of `owner`."""
    return next((kind for kind in STORED if f"{owner}.{kind.PARTS[1]}" in names), None)


def kind_that_saved(scheme: Tensor, name: str) -> type[StoredModule]:
    """Returns the class of the module that saved the tensor `scheme`, called `name` in messages.

    Raises ValueError if the tensor is not a scheme, or is the scheme of a module that trains.
    """
    module = read_any(scheme, name)["module"]
    for kind in STORED:
        if kind.__name__ == module:
            return kind
    raise ValueError(f"{name} is that of a {module}, not of a linear without float weights")
