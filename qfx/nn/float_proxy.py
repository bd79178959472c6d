"""FloatProxy: a tensor of floats that is stored in a smaller form, and two rules for its operators.

An operator that only reads such a tensor computes with the floats that it represents. An operator
that writes to it, according to its schema, runs on these floats, and the result is stored again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.host.subclasses import NO_TORCH_FUNCTION, as_made_of, decomposed
from qfx.host.tensors import tree_leaves, tree_map

aten = torch.ops.aten
_NARROW = (torch.bfloat16, torch.float16)
_SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default)


class ViewCall(NamedTuple):
    """An operator call that returns a view of a tensor. If the call returns several views, `place`
    is the index of the one that is meant."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Applies the call to `tensor` and returns the view."""
        found = self.func(tensor, *self.args, **self.kwargs)
        return found if self.place is None else found[self.place]


class FloatProxy(Tensor):
    """A tensor of floats that are computed when they are read and stored in another form.

    A subclass defines how they are computed and stored. With `rule` it adds operators that do not
    need the floats.
    """

    __torch_function__ = NO_TORCH_FUNCTION

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the floats as a new tensor, in the dtype of this tensor or in `dtype`."""
        raise NotImplementedError

    def write(self, value: Tensor) -> None:
        """Stores `value`, a tensor of floats of the same shape."""
        raise NotImplementedError

    def alias(self) -> Tensor:
        """Returns another tensor with the same memory."""
        raise NotImplementedError

    def viewed(self, taken: ViewCall, like: Tensor) -> Tensor:
        """Returns the view of this tensor that the call `taken` takes. `like`: a tensor with the
        shape, strides and dtype of the view."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(map(_wraps_others, types)):
            return NotImplemented  # for example, a DTensor of such tensors handles the call
        kwargs = kwargs or {}
        for own in _RULES.get(func, ()):
            found = own(func, args, kwargs)
            if found is not NotImplemented:
                return found
        if (found := decomposed(func, args, kwargs)) is not NotImplemented:
            return found  # an operator composed of others, such as matmul and to
        first = args[0] if args else None
        if isinstance(first, FloatProxy) and func in _SAME:
            with as_made_of(first):
                return first.alias()
        if func._schema.is_mutable:
            return _written(func, args, kwargs)
        if isinstance(first, FloatProxy) and func.is_view:
            return _viewed(first, func, args[1:], kwargs)
        return func(*tree_map(_floats, args), **tree_map(_floats, kwargs))


Rule = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
_RULES: dict[Any, list[Rule]] = {}


def rule(*operators: Any) -> Callable[[Rule], Rule]:
    """Registers a function that computes these operators if one of their arguments is a
    `FloatProxy`. The function gets the operator, its arguments and its keywords, and returns
    NotImplemented if it does not apply."""

    def register(function: Rule) -> Rule:
        for operator in operators:
            _RULES.setdefault(operator, []).append(function)
        return function

    return register


def _wraps_others(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__") and not issubclass(kind, FloatProxy)


def _floats(value: Any) -> Any:
    return value.dequantize() if isinstance(value, FloatProxy) else value


def _viewed(of: FloatProxy, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    taken, found = ViewCall(func, tuple(args), kwargs), _geometry(of, func, args, kwargs)
    with as_made_of(of):
        if isinstance(found, Tensor):
            same = _same_geometry(found, of) and func not in _TURNS
            return of.alias() if same else of.viewed(taken, found)
        return [of.viewed(taken._replace(place=i), each) for i, each in enumerate(found)]


def _geometry(of: Tensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns tensors without values that have the shapes and strides of the views that `func`
    returns."""
    like = torch.empty_strided(of.shape, of.stride(), dtype=of.dtype, device="meta")
    return func(like, *args, **kwargs)


def _same_geometry(a: Tensor, b: Tensor) -> bool:
    of = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (a, b)]
    return of[0] == of[1]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator that writes to quantized tensors: computes with their floats, and stores the
    floats that the operator wrote."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    found = {id(t): t for t in tensors if isinstance(t, FloatProxy)}
    others = {id(t): t for t in tensors if id(t) not in found and t.dtype in _NARROW}
    several = any(isinstance(each, list | tuple) for each in args)
    wide = torch.Tag.pointwise in func.tags and not (several and others)
    floats = {key: _of_width(t, wide) for key, t in found.items()}
    if wide and not any(id(t) in others for t in _targets(func, args, kwargs, Tensor)):
        floats |= {key: t.float() for key, t in others.items()}
    out = func(*tree_map(_put(floats), args), **tree_map(_put(floats), kwargs))
    for tensor in _targets(func, args, kwargs, FloatProxy):
        if tensor.shape != floats[id(tensor)].shape:
            shape = list(floats[id(tensor)].shape)
            raise ValueError(
                f"{func} changes a quantized tensor {list(tensor.shape)} to {shape}, which has to "
                "keep its shape: assign a new one in its place"
            )
        tensor.write(floats[id(tensor)])
    back = {id(floats[key]): tensor for key, tensor in found.items()}
    return tree_map(_put(back), out)


def _of_width(tensor: FloatProxy, wide: bool) -> Tensor:
    """Returns the floats of `tensor` for an operator that may write to them; in float32 instead of
    a 16-bit dtype if `wide`. Pointwise operators compute in float32, so that a small change of a
    bfloat16 weight is not rounded twice."""
    return tensor.dequantize(torch.float32 if wide and tensor.dtype in _NARROW else None)


def _put(other: Mapping[int, Any]) -> Callable[[Any], Any]:
    return lambda value: other.get(id(value), value) if isinstance(value, Tensor) else value


def _targets(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: Any) -> Iterator[Any]:
    """Yields the tensors of class `kind` that the operator writes, according to its schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from (t for t in tree_leaves(given) if isinstance(t, kind))
