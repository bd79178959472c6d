"""Placeholder: stands for a linear or embedding without float weights while transformers loads its
parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qfx.io.errors import UserError
from qfx.io.printable import printable
from qfx.nn.embedding import Embedding
from qfx.nn.linear_like import as_linear
from qfx.nn.loading import StoredModule
from qfx.nn.scheme_tensor import KEY, LENGTH
from qfx.nn.stored_modules import NAMES, kind_that_saved, replaces

MARK = "weight"  # in files beside the codes: see `qfx/hf/state_dict.py`


class Placeholder(nn.Module):
    """Buffers without values, of the types and shapes that the scheme asks for, and the bias of the
    module in whose place it stands. Raises ValueError for numbers that are no scheme, or that of
    another kind of module."""

    def __init__(self, module: nn.Module, numbers: list[int], name: str) -> None:
        super().__init__()
        padded = [*numbers, *[0] * (LENGTH - len(numbers))]
        said = torch.tensor(padded, dtype=torch.int32, device="cpu")  # whatever device is the usual
        self.kind = kind_that_saved(said, f"{name}.{KEY}")
        if not replaces(self.kind, module):
            raise UserError(
                f"from_pretrained: config.json says that {printable(name)} is {NAMES[self.kind]}, "
                f"and it is a {type(module).__name__}"
            )
        linear = as_linear(module)
        self.of = (linear,)  # no module of this one
        self.linear_sizes = tuple(linear.weight.shape)
        self.bias = getattr(linear, "bias", None)
        self.wanted = {
            KEY: (torch.int32, (LENGTH,)),
            MARK: (torch.int8, self.linear_sizes[:1]),
            **self.kind.kinds(said, f"{name}.{KEY}", *self.linear_sizes),
        }
        for part, (dtype, shape) in self.wanted.items():
            self.register_buffer(part, torch.empty(shape, dtype=dtype, device="meta"))
        self._is_hf_initialized = True  # so transformers leaves it to us what is in it

    def taken(self, name: str) -> Any:
        """What was loaded, checked. Raises ValueError where a part was in no file."""
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
        """The module; an embedding's rows are of the type that the model is loaded in."""
        (linear,) = self.of
        module = self.kind.from_state(linear, state).train(self.training)
        if isinstance(module, Embedding):
            return module.to(linear.weight.dtype)
        module.bias = self.bias
        return module


def _loaded(tensor: Any) -> bool:
    """transformers makes empty tensors in the place of what files lack; what it has read from one
    it marks."""
    return isinstance(tensor, Tensor) and getattr(tensor, "_is_hf_initialized", False)
