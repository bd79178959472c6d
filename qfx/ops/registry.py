"""Ties an operator's parts together: C++ schema and kernels, reference, fake, gradient.

`REFERENCES[name]` is the definition of `torch.ops.qfx.<name>` in plain torch. A test fails when an
operator lacks one of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import qfx._C  # noqa: F401  (loading the extension registers the operators)
from qfx.host.autograd import any_requires_grad, in_forward_mode, redispatch_below
from qfx.host.operators import schema

REFERENCES: dict[str, Callable[..., Any]] = {}
FAKES: dict[str, Callable[..., Any]] = {}
NO_GRADIENT: list[str] = []
_AUTOGRAD = torch.library.Library("qfx", "IMPL")
WHY_FIRST_ORDER = "a straight-through gradient is not the derivative of a function"
Setup = Callable[[Any, tuple[Any, ...], Any], None]
Formula = Callable[..., Any]


def reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers the definition of the operator that has the function's name."""
    REFERENCES[function.__name__] = function
    return function


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the shape and dtype function of operator `name`; mixed devices are an error."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            devices = {str(t.device) for t in _tensors(args)}
            if len(devices) > 1:
                where = " and ".join(sorted(devices))
                raise RuntimeError(f"{name}: operands are on {where}; move all to one device")
            return function(*args)

        torch.library.register_fake(f"qfx::{name}", checked)
        FAKES[name] = function
        return function

    return register


def _tensors(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments, and in lists of them."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)


def linear_fake(name: str) -> None:
    """Registers that of a linear: of x or q [..., K] it returns `out_dtype` [..., N], N as its
    `layout` says."""
    names = [argument.name for argument in schema(getattr(torch.ops.qfx, name).default).arguments]
    left, dtype = names.index("q" if "q" in names else "x"), names.index("out_dtype")
    layout = names.index("layout")

    def result(*args: Any) -> Tensor:
        shape = (*args[left].shape[:-1], args[layout][0])
        empty: Tensor = args[left].new_empty(shape, dtype=args[dtype])
        return empty

    fake(name)(result)


def gradient(name: str, setup: Setup, formula: Formula) -> None:
    """Gives operator `name` a first-order gradient; tangents and second orders are errors.

    `setup(ctx, inputs, output)` saves what `formula(ctx, *grads)` needs, which returns a gradient
    for each input. As `torch.library.register_autograd`, which would lose tangents without a word.
    """
    op = getattr(torch.ops.qfx, name).default
    defaults = [argument.default_value for argument in schema(op).arguments]

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        output = redispatch_below(op, keyset, args)
        # torch leaves out trailing arguments at their default
        setup(ctx, (*args, *defaults[len(args) :]), output)
        return output

    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"qfx::{name} has no second derivative: {WHY_FIRST_ORDER}; call backward or grad "
                "with create_graph=False"
            )
        return None, *formula(ctx, *grads)

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"BackwardOf_{name}", (torch.autograd.Function,), parts)

    def kernel(keyset: Any, *args: Any) -> Any:
        if in_forward_mode():
            refuse_tangents(f"qfx::{name}", args)
        if torch.is_grad_enabled() and any_requires_grad(*args):
            return function.apply(keyset, *args)
        return redispatch_below(op, keyset, args)

    _AUTOGRAD.impl(name, kernel, "Autograd", with_keyset=True)


INSTEAD = "use qfx::linear_ste where gradients are needed, as the qfx backend does by itself"


def no_gradient(name: str, instead: str = INSTEAD) -> None:
    """Makes `backward` through operator `name` an error sentence instead of a silent None."""

    def formula(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"qfx::{name} is an inference operator and has no gradient. Run it under "
            f"torch.no_grad(), or {instead}."
        )

    gradient(name, lambda ctx, inputs, output: None, formula)
    NO_GRADIENT.append(name)


def refuse_tangents(what: str, arguments: Sequence[Any]) -> None:
    """Raises NotImplementedError when an argument carries a forward-mode tangent."""
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(
                f"{what}: argument {i} carries a forward-mode tangent, which int8 operators cannot "
                "propagate; run this computation in float"
            )
