"""Placeholders for linears, embeddings and experts of a saved int8 model whose tensors
transformers has not loaded yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qfx.files.expert_blocks import put_together
from qfx.files.replaced import Replaced, made_from, size_of
from qfx.io.errors import UserError, printable
from qfx.nn.conv_like import is_convolution
from qfx.nn.embedding import Embedding
from qfx.nn.experts import Experts
from qfx.nn.experts_like import FloatProduct, products_of
from qfx.nn.linear_like import as_linear
from qfx.nn.scheme_tensor import KEY, LENGTH, of_numbers
from qfx.nn.stacked_weight import StackedWeight
from qfx.nn.stored_modules import NAMES, Stored, StoredKind, kind_that_saved, replaces

MARK = "weight"  # saved next to the codes: see `qfx/hf/state_dict.py`
MARK_OF_EXPERTS = (1, 2, 2)  # the shape of what is saved by the names of float experts


class Placeholder(nn.Module):
    """A module with buffers on the meta device, of the dtypes and shapes that the scheme of the
    saved module requires, and with the bias of the module or product that it replaces.

    Raises ValueError if `numbers` are not a scheme, or belong to another kind of module.
    """

    def __init__(self, module: Replaced, numbers: list[int], name: str) -> None:
        super().__init__()
        scheme = of_numbers(numbers)
        self.kind = _kind(module, scheme, name)
        of: Any = module
        if isinstance(module, nn.Module) and not is_convolution(module):
            of = as_linear(module)
        self.of = (of,)  # in a tuple, so that it is not registered as a submodule
        self.size = size_of(module)
        self.in_features = self.size[-1]  # models initialize by it
        self.bias = getattr(of, "bias", None)
        self.wanted = {
            KEY: (torch.int32, (LENGTH,)),
            **self.kind.kinds(scheme, f"{name}.{KEY}", *self.size),
        }
        if self.kind is not StackedWeight:
            self.wanted[MARK] = torch.int8, self.size[:1]
        for part, (dtype, shape) in self.wanted.items():
            self.register_buffer(part, torch.empty(shape, dtype=dtype, device="meta"))
        self._is_hf_initialized = True  # so that transformers does not initialize it

    def taken(self, name: str) -> Any:
        """Returns the loaded tensors of the module `name`, checked. Raises ValueError if no file of
        the model contains one of them."""
        names = [part for part in self.wanted if part in self.kind.PARTS]
        parts = {f"{name}.{part}": self._buffers[part] for part in names}
        absent = [n for n, tensor in parts.items() if not _loaded(tensor)]
        if absent:
            raise UserError(f"no file of the model has {', '.join(absent)}")
        found = self.kind.taken_from(parts, f"{name}.", *self.size)
        assert found is not None
        return found

    def made(self, state: Any) -> Stored:
        """Returns the int8 module with the tensors `state`, the result of `taken`. An embedding
        returns rows in the dtype that the model is loaded in."""
        (of,) = self.of
        module = made_from(state, of, self.kind).train(self.training)
        if isinstance(module, Embedding):
            return module.to(of.weight.dtype)
        module.bias = self.bias
        return module


class ExpertsPlaceholder(nn.Module):
    """Placeholders for both products of a block of experts, and buffers for what is saved in the
    place of its float weights."""

    def __init__(self, block: nn.Module, up: Placeholder, down: Placeholder) -> None:
        super().__init__()
        self.of = (block,)
        self.up, self.down = up, down
        for product in products_of(block):
            mark = torch.empty(MARK_OF_EXPERTS, dtype=torch.int8, device="meta")
            self.register_buffer(product.name, mark)
        self._is_hf_initialized = True

    def made(self) -> Experts:
        """Returns the int8 experts. `up` and `down` are int8 weights by now."""
        up: Any = self.up
        down: Any = self.down
        return put_together(*self.of, up, down)


def _kind(module: Replaced, scheme: Tensor, name: str) -> StoredKind:
    if isinstance(module, FloatProduct):
        return StackedWeight
    kind = kind_that_saved(scheme, f"{name}.{KEY}")
    if not replaces(kind, module):
        raise UserError(
            f"from_pretrained: config.json says that {printable(name)} is {NAMES[kind]}, "
            f"and it is a {type(module).__name__}"
        )
    return kind


def _loaded(tensor: Any) -> bool:
    """Whether the tensor was loaded. transformers creates empty tensors for those that are in no
    file, and marks those that it has read."""
    return isinstance(tensor, Tensor) and getattr(tensor, "_is_hf_initialized", False)
