"""Finds the modules of a skeleton, and the products of its experts, that quantized weights of files
replace."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from qfx.files.tensor_file import TensorEntry
from qfx.io.errors import UserError, printable
from qfx.nn.conv import Conv
from qfx.nn.conv_like import is_convolution
from qfx.nn.embedding import Embedding
from qfx.nn.experts_like import FloatProduct
from qfx.nn.linear import Linear
from qfx.nn.linear_like import as_linear, sizes_of
from qfx.nn.loading import StoredModule
from qfx.nn.sign_linear import SignLinear
from qfx.nn.stacked_weight import StackedWeight
from qfx.nn.stored_modules import NAMES, Stored, StoredKind, kind_of, replaces

Replaced = nn.Module | FloatProduct  # a float linear, embedding or product of experts


def kind_in(owner: str, stored: Mapping[str, TensorEntry]) -> StoredKind | None:
    """Returns the class of the quantized weight `owner` of a file; None if there are no codes of
    it. Codes of experts have three dimensions."""
    kind = kind_of(owner, stored)
    if kind is Linear and len(stored[f"{owner}.{kind.PARTS[1]}"].shape) == 3:
        return StackedWeight
    return kind


def linear_names(
    skeleton: nn.Module,
    products: Collection[str],
    stored: Mapping[str, TensorEntry],
    described: Collection[str] | None,
) -> list[str]:
    """Returns the names of the linears and products of experts that are created from files.
    `described`: those that a manifest names, None without a manifest. 1-bit
    linears are missing in manifests of earlier versions; those that the skeleton already contains
    are loaded with its state dict."""
    modules = dict(skeleton.named_modules(remove_duplicate=False))
    owners = dict.fromkeys(name.rpartition(".")[0] for name in stored)
    kinds = {name: kind_in(name, stored) for name in owners}

    def takes(name: str) -> bool:
        module, kind = modules.get(name), kinds[name]
        if isinstance(module, nn.Linear | Linear | Conv | StackedWeight):
            return True
        if kind is None or kind is StackedWeight:
            return kind is not None and name in products
        return module is not None and replaces(kind, module)

    found = [name for name, kind in kinds.items() if kind and takes(name)]
    if described is not None:
        found = [*described, *(n for n in found if kinds[n] is SignLinear and n not in described)]
    return [name for name in found if not isinstance(modules.get(name), SignLinear)]


def size_of(module: Replaced) -> tuple[int, ...]:
    """Returns the shape of the weight: [N, K], or [E, N, K] of experts."""
    if isinstance(module, FloatProduct):
        return tuple(module.weights.shape)
    if is_convolution(module):
        return sizes_of(module)[::-1]
    return tuple(as_linear(module).weight.shape)


def replaced(
    skeleton: nn.Module,
    products: Mapping[str, FloatProduct],
    name: str,
    stored: Mapping[str, TensorEntry],
    at: str,
) -> Replaced:
    """Returns what the quantized weight `name` of a file replaces. Raises UserError, with the name
    `at` of the file, if the skeleton has nothing of that name and size that it can replace."""
    found = dict(skeleton.named_modules(remove_duplicate=False)).get(name)
    here = f"{at}: {printable(name)}"
    kind = kind_in(name, stored)
    module = products.get(name) if kind is StackedWeight else found
    what = NAMES[kind or Linear]
    if isinstance(found, Linear | Conv | Embedding | StackedWeight):
        raise UserError(f"{here} is int8 in the skeleton already: qfx.load takes a float model")
    fits = isinstance(module, FloatProduct) or (module and replaces(kind or Linear, module))
    if module is None or not fits:
        other = "nothing" if found is None else f"a {type(found).__name__}"
        raise UserError(f"{here} is {what}, and the skeleton has {other} of that name")
    if kind is None:
        raise UserError(f"{here} is said to be {what}, and has no codes")
    codes, size = kind.PARTS[1], size_of(module)
    shape = stored[f"{name}.{codes}"].shape
    if shape not in kind.shapes(*size):
        word = {Embedding: "embedding", StackedWeight: "product"}.get(kind, "linear")
        raise UserError(
            f"{here} has {codes} {list(shape)}, and the {word} of the skeleton a weight "
            f"{list(size)}"
        )
    return module


def made_from(found: Any, module: Replaced, kind: StoredKind) -> Stored:
    """Returns the weight of the class `kind` that replaces `module`, made from the tensors `found`,
    the result of `kind.taken_from`."""
    if isinstance(module, FloatProduct):
        return StackedWeight.from_state(module, found)
    if is_convolution(module):
        return Conv.from_state(module, found)
    assert issubclass(kind, StoredModule)
    return kind.from_state(as_linear(module), found)


def quantized_as(kind: type[StoredModule], module: nn.Module) -> nn.Module:
    """Returns the module of this class that replaces a float linear or embedding; of a convolution,
    a `Conv`."""
    return Conv.from_float(module) if is_convolution(module) else kind.from_float(module)  # type: ignore[arg-type]
