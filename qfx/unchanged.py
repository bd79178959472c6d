"""Unchanged: a model and the default random generators are left as they were by what runs inside.

Put back are which parameters and buffers each module has, the values of buffers and of parameters
that a captured graph writes, and what `.data = ...` replaced; the default generators of torch on
CPUs and CUDA, of Python and of numpy. Not so Python attributes, inputs, and other generators.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from qfx.capture import attribute, is_constant
from qfx.effects import written_roots


@contextmanager
def unchanged(model: Callable[..., Any], who: str) -> Iterator[None]:
    """Puts back what runs inside changes, also where it raises. Memory: the buffers, once more.

    Warns, in the name of `who`, of parameters that code outside any captured graph wrote to: they
    keep what it wrote. Copies of all parameters would double the memory of a model.
    """
    module = module_of(model)
    kept, generators = _Kept(module), _generators()
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)
        written = kept.restore()
        for put_back in generators:
            put_back()
        if written:
            warnings.warn(
                f"qfx.{who}: the forward of the model wrote to its parameters "
                f"{', '.join(written)}, which could not be undone: they keep what it wrote",
                stacklevel=4,
            )


def keep_written(gm: fx.GraphModule) -> Callable[[Sequence[Any]], None]:
    """For a captured graph a function of its arguments, to be called before it runs: parameters and
    buffers that the graph may write will be put back."""
    written = written_roots(gm.graph)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    at = [i for i, n in enumerate(inputs) if n in written and is_constant(n)]
    held = [attribute(n) for n in written if n.op == "get_attr"]

    def keep(arguments: Sequence[Any]) -> None:
        kept = _KEPT.get(None)
        for tensor in (*held, *(arguments[i] for i in at)):
            if kept is not None and isinstance(tensor, Tensor):
                kept.keep(tensor)

    return keep


def in_training(model: Callable[..., Any]) -> str:
    """Which modules of the model are in training mode, as words; '' where none is."""
    module = module_of(model)
    each = [m for m in module.modules() if not isinstance(m, fx.GraphModule)] if module else []
    count = sum(m.training for m in each)
    if not count:
        return ""
    return (
        "the model is" if count == len(each) else f"{count} of the model's {len(each)} modules are"
    )


def module_of(model: Any) -> nn.Module | None:
    """The module that is called; None for a function."""
    while isinstance(model, partial):
        model = model.func
    owner = getattr(model, "__self__", None)
    for found in (getattr(model, "_orig_mod", None), model, owner):
        if isinstance(found, nn.Module):
            return found
    return None


class _Value(NamedTuple):
    """A tensor, where its values were, and a copy of them."""

    tensor: Tensor
    memory: Tensor
    copy: Tensor

    def put_back(self) -> None:
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            _put_memory_back(self.tensor, self.memory)
            if not _same_bits(self.tensor, self.copy):
                self.tensor.copy_(self.copy)


class _Kept:
    """What is put back of a model."""

    def __init__(self, module: nn.Module | None) -> None:
        modules = [] if module is None else [*module.modules()]
        registries: list[dict[str, Any]] = [r for m in modules for r in (m._parameters, m._buffers)]
        self.registries = [(registry, dict(registry)) for registry in registries]
        named = [] if module is None else [*module.named_parameters()]
        self.parameters = [(n, p, p.data, _version(p)) for n, p in named if not is_lazy(p)]
        self.values: dict[int, _Value] = {}
        for each in modules:
            read_only = getattr(each, "READ_ONLY", ())  # a quantized weight is large
            for name, buffer in each._buffers.items():
                if buffer is not None and not is_lazy(buffer) and name not in read_only:
                    self.keep(buffer)

    def keep(self, tensor: Tensor) -> None:
        """Remembers its values, the first time."""
        if id(tensor) not in self.values:
            copy = tensor.detach().clone()
            self.values[id(tensor)] = _Value(tensor, tensor.data, copy)

    @torch.no_grad()
    def restore(self) -> list[str]:
        """The names of parameters that were written and cannot be put back."""
        written = [
            name
            for name, parameter, _, version in self.parameters
            if _version(parameter) != version and id(parameter) not in self.values
        ]
        for registry, before in self.registries:
            if {n: id(t) for n, t in registry.items()} != {n: id(t) for n, t in before.items()}:
                registry.clear()
                registry.update(before)
        for _, parameter, memory, _ in self.parameters:
            _put_memory_back(parameter, memory)
        for value in self.values.values():
            value.put_back()
        return written


_KEPT: ContextVar[_Kept] = ContextVar("kept")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _put_memory_back(tensor: Tensor, memory: Tensor) -> None:
    """Undoes `tensor.data = ...`."""
    place = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (tensor, memory) if _is_plain(t)]
    if len(place) == 2 and place[0] != place[1]:
        tensor.data = memory


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """False where that cannot be seen."""
    if not _is_plain(a):
        return False
    as_bytes = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*as_bytes)


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return dense and type(tensor) in (Tensor, nn.Parameter)


def _generators() -> list[Callable[[], None]]:
    """What puts the default generators back to where they are now."""
    found: list[Callable[[], None]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():
        found.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if numpy := sys.modules.get("numpy.random"):
        found.append(partial(numpy.set_state, numpy.get_state()))
    return found
