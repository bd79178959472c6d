"""EmbeddingWeight: the table of an int8 embedding as a tensor of floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from qfx.host.subclasses import SET_DATA, wrapper
from qfx.host.tensors import without_subclass
from qfx.nn.float_proxy import FloatProxy, ViewCall, rule
from qfx.nn.weight_view import WeightView


class CodesOwner(Protocol):
    """The interface of the module that stores the int8 codes of the table; `qfx.nn.Embedding` has
    it."""

    packed: Tensor

    def floats(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the whole table [V, D] as floats, in `dtype`, or else in the dtype of the
        rows."""

    def looked_up(self, ids: Tensor) -> Tensor:
        """Returns the rows [.., D] of the ids [..] as floats, in the dtype of the rows."""

    def store(self, value: Tensor) -> None:
        """Writes the float table `value` [V, D]: quantizes the rows that differ from the present
        ones."""


class EmbeddingWeight(FloatProxy):
    """The weight [V, D] of an int8 embedding, created at each access.

    Reading it gives floats. Writing to it, to its `data` or to a view quantizes the changed rows
    again. It is not a parameter and does not train.
    """

    table: CodesOwner

    @staticmethod
    def __new__(
        cls, table: CodesOwner, shape: Sequence[int], dtype: torch.dtype
    ) -> EmbeddingWeight:
        """Creates the weight of `table`, whose rows have the dtype `dtype`."""
        made = wrapper(cls, shape, dtype, table.packed.device)
        made.table = table
        return made

    __init__ = object.__init__  # type: ignore[assignment]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Implements `FloatProxy.dequantize`."""
        return self.table.floats(dtype or self.dtype)

    def write(self, value: Tensor) -> None:
        """Implements `FloatProxy.write`."""
        self.table.store(value)

    def alias(self) -> EmbeddingWeight:
        """Implements `FloatProxy.alias`."""
        return EmbeddingWeight(self.table, self.shape, self.dtype)

    def viewed(self, taken: ViewCall, like: Tensor) -> WeightView:
        """Implements `FloatProxy.viewed`."""
        return WeightView(self, (taken,), like)

    def is_shared(self) -> bool:
        """Whether the codes are in memory that processes share."""
        return self.table.packed.is_shared()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"EmbeddingWeight({list(self.shape)}, {self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().__reduce_ex__(protocol)  # floats: codes are the module's

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.dequantize()

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        own = _PYTHON.get(func)
        if own is not None and isinstance(args[0], EmbeddingWeight):
            return own(*args, **(kwargs or {}))
        with without_subclass():
            return func(*args, **(kwargs or {}))


def _set_data(weight: EmbeddingWeight, value: Any) -> None:
    """Implements `weight.data = value`. `weight.data += d` also ends here: `value` is then an alias
    of the weight, and the sum was already written through the alias."""
    if not (isinstance(value, EmbeddingWeight) and value.table is weight.table):
        weight.write(value)


def _no_memory(weight: EmbeddingWeight, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"{weight!r} has no floats in memory: weight.dequantize() makes them")


_PYTHON: dict[Any, Callable[..., Any]] = {
    SET_DATA: _set_data,
    Tensor.numpy: _no_memory,
    Tensor.data_ptr: lambda weight: weight.table.packed.data_ptr(),
}


@rule(torch.ops.aten.embedding.default)
def _(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    weight, ids = args[:2]
    return weight.table.looked_up(ids) if isinstance(weight, EmbeddingWeight) else NotImplemented
