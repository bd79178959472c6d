"""Placeholders for linears and embeddings of a saved int8 model whose tensors transformers has not
loaded yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qfx.io.errors import UserError, printable
from qfx.nn.embedding import Embedding
from qfx.nn.linear_like import as_linear
from qfx.nn.loading import StoredModule
from qfx.nn.scheme_tensor import KEY, LENGTH
from qfx.nn.stored_modules import NAMES, kind_that_saved, replaces

MARK = "weight"  # saved next to the codes: see `qfx/hf/state_dict.py`


class Placeholder(nn.Module):
    """A module with buffers on the meta device, of the dtypes and shapes that the scheme of the
    saved module requires, and with the bias of the module that it replaces.

    Raises ValueError if `numbers` are not a scheme, or belong to another kind of module.
    """

    def __init__(self, module: nn.Module, numbers: list[int], name: str) -> None:
        super().__init__()
        padded = [*numbers, *[0] * (LENGTH - len(numbers))]
        scheme = torch.tensor(padded, dtype=torch.int32, device="cpu")  # not on the default device
        self.kind = kind_that_saved(scheme, f"{name}.{KEY}")
        if not replaces(self.kind, module):
            raise UserError(
                f"from_pretrained: config.json says that {printable(name)} is {NAMES[self.kind]}, "
                f"and it is a {type(module).__name__}"
            )
        linear = as_linear(module)
        self.of = (linear,)  # in a tuple, so that it is not registered as a submodule
        self.linear_sizes = tuple(linear.weight.shape)
        self.bias = getattr(linear, "bias", None)
        self.wanted = {
            KEY: (torch.int32, (LENGTH,)),
            MARK: (torch.int8, self.linear_sizes[:1]),
            **self.kind.kinds(scheme, f"{name}.{KEY}", *self.linear_sizes),
        }
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
        n, k = self.linear_sizes
        found = self.kind.taken_from(parts, f"{name}.", n, k)
        assert found is not None
        return found

    def made(self, state: Any) -> StoredModule:
        """Returns the int8 module with the tensors `state`, the result of `taken`. An embedding
        returns rows in the dtype that the model is loaded in."""
        (linear,) = self.of
        module = self.kind.from_state(linear, state).train(self.training)
        if isinstance(module, Embedding):
            return module.to(linear.weight.dtype)
        module.bias = self.bias
        return module


def _loaded(tensor: Any) -> bool:
    """Whether the tensor was loaded. transformers creates empty tensors for those that are in no
    file, and marks those that it has read."""
    return isinstance(tensor, Tensor) and getattr(tensor, "_is_hf_initialized", False)
