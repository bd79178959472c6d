"""The linears and embeddings without float weights that files hold, and which of them a saved
scheme is of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn

from qfx.nn.embedding import Embedding
from qfx.nn.linear import Linear
from qfx.nn.linear_like import is_embedding, is_linear
from qfx.nn.loading import StoredModule
from qfx.nn.modules_to_save import watch_wrappers
from qfx.nn.scheme_tensor import read_any
from qfx.nn.sign_linear import SignLinear

STORED: tuple[type[StoredModule], ...] = (Linear, SignLinear, Embedding)
NAMES: dict[Any, str] = {
    Linear: "an int8 linear",
    SignLinear: "a linear of one bit",
    Embedding: "an int8 embedding",
}
# Who hears of each model that got some of them.
LISTENERS: list[Callable[[nn.Module], None]] = [watch_wrappers]


def notify_listeners(model: nn.Module) -> None:
    """Whoever makes, converts or loads such linears says so."""
    for tell in LISTENERS:
        tell(model)


def stored_linears(model: nn.Module) -> Iterator[tuple[str, StoredModule]]:
    """By every name."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, StoredModule) and module.is_quantized:
            yield name, module


def replaces(kind: type[StoredModule], module: nn.Module) -> bool:
    """Whether this float module is one in whose place those of the kind stand."""
    return is_embedding(module) if issubclass(kind, Embedding) else is_linear(module)


def kind_of(owner: str, names: Collection[str]) -> type[StoredModule] | None:
    """Of the linear `owner`, by the name that its codes have among those of a state dict."""
    return next((kind for kind in STORED if f"{owner}.{kind.PARTS[1]}" in names), None)


def kind_that_saved(scheme: Tensor, name: str) -> type[StoredModule]:
    """Raises ValueError where the tensor `name` is no scheme, or that of a module that trains."""
    module = read_any(scheme, name)["module"]
    for kind in STORED:
        if kind.__name__ == module:
            return kind
    raise ValueError(f"{name} is that of a {module}, not of a linear without float weights")
