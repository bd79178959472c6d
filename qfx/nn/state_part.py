"""StatePart: a tensor of a state dict whose values the module stores in another form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qfx.host.tensors import storage_id, tree_leaves, tree_map, version, without_subclass

_AVERAGES = (
    "{} a state dict's part of a quantized weight: codes and scales belong together, and are no "
    "floats to average. Average parameters, as torch.optim.swa_utils.AveragedModel does"
)
_ARITHMETIC = (
    Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_, Tensor.lerp_,
    Tensor.__iadd__, Tensor.__isub__, Tensor.__imul__, Tensor.__itruediv__,
)  # fmt: skip


class StatePart(Tensor):
    """A tensor of a state dict, such as unpacked codes, that writes its changes back to the module.

    Writing to it, or to a view of it, changes the module: `for k, v in model.state_dict().items():
    v.copy_(new[k])` loads `new`. It has its own memory and is saved as a plain tensor. Raises
    TypeError if floats are written to integers, as in an average of two state dicts.
    """

    _stored: Callable[[], None]

    @classmethod
    def of(cls, tensor: Tensor, stored: Callable[[], None]) -> StatePart:
        """Returns `tensor` as a StatePart. `stored` is called after the values of the tensor were
        changed in place."""
        with without_subclass():
            part = tensor.as_subclass(cls)
        part._stored = stored
        return part

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        parts = [t for t in tree_leaves((args, kwargs)) if isinstance(t, StatePart)]
        with without_subclass():
            if func is Tensor.copy_:
                _check_kind(*args[:2], **kwargs)
            elif func in _ARITHMETIC:
                raise TypeError(_AVERAGES.format("arithmetic on"))
            before = [version(part) for part in parts]
            found = func(*args, **kwargs)
            changed = [p for p, was in zip(parts, before, strict=True) if version(p) != was]
            for stored in dict.fromkeys(part._stored for part in changed):
                stored()
            by_memory = {storage_id(part): part for part in parts}
            return tree_map(lambda each: _alias(each, by_memory), found)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return _plain(self).clone()


def _alias(found: Any, by_memory: Mapping[int | None, StatePart]) -> Any:
    if not isinstance(found, Tensor) or isinstance(found, StatePart):
        return found
    part = by_memory.get(storage_id(found))
    return found if part is None else StatePart.of(found, part._stored)


def _check_kind(to: Tensor, of: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(of, Tensor) and of.is_floating_point() and not to.is_floating_point():
        raise TypeError(_AVERAGES.format(f"{of.dtype} is written to {to.dtype} of"))


def _plain(part: Tensor) -> Tensor:
    with without_subclass():
        return torch.Tensor.detach(part).as_subclass(Tensor)
