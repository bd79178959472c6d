"""Registry: ties the parts of an operator together: C++ schema and kernels, reference, fake
implementation, gradient.

`REFERENCES[name]` is the definition of `torch.ops.qfx.<name>` in plain torch. A test fails if an
operator lacks one of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qfx.host.autograd import any_requires_grad, in_forward_mode, redispatch_below
from qfx.host.inductor_packages import declare_package_calls
from qfx.host.native_library import make_symbols_global  # (loading libqfx registers operators)
from qfx.host.operators import schema

REFERENCES: dict[str, Callable[..., Any]] = {}
FAKES: dict[str, Callable[..., Any]] = {}
NO_GRADIENT: list[str] = []
IN_PYTHON: list[str] = []  # operators without C++
make_symbols_global()
_AUTOGRAD = torch.library.Library("qfx", "IMPL")
_DEFINED = torch.library.Library("qfx", "FRAGMENT")
WHY_FIRST_ORDER = "a straight-through gradient is not the derivative of a function"
Setup = Callable[[Any, tuple[Any, ...], Any], None]
Formula = Callable[..., Any]


def reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers the definition of the operator that has the function's name."""
    REFERENCES[function.__name__] = function
    return function


def in_python(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers an operator that has no C++: its definition is also its kernel, on the CPU.
    `signature`: the arguments and results of its schema."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _DEFINED.define(function.__name__ + signature)
        _DEFINED.impl(function.__name__, function, "CPU")
        IN_PYTHON.append(function.__name__)
        return reference(function)

    return register


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the shape and dtype function of operator `name`; mixed devices are an error."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            declare_package_calls()
            devices = {str(t.device) for t in _tensors(args)}
            if len(devices) > 1:
                where = " and ".join(sorted(devices))
                raise RuntimeError(f"{name}: operands are on {where}; move all to one device")
            return function(*args)

        torch.library.register_fake(f"qfx::{name}", checked)
        FAKES[name] = function
        return function

    return register


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among the arguments, including those in lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)


def linear_fake(name: str) -> None:
    """Registers the fake of a linear: for x or q [..., K] it returns `out_dtype` [..., N], with N
    from its `layout`."""
    names = [argument.name for argument in schema(getattr(torch.ops.qfx, name).default).arguments]
    left, dtype = names.index("q" if "q" in names else "x"), names.index("out_dtype")
    layout = names.index("layout")

    def result(*args: Any) -> Tensor:
        shape = (*args[left].shape[:-1], args[layout][0])
        empty: Tensor = args[left].new_empty(shape, dtype=args[dtype])
        return empty

    fake(name)(result)


def gradient(name: str, setup: Setup, formula: Formula) -> None:
    """Gives operator `name` a first-order gradient. Tangents and second orders raise errors.

    `setup(ctx, inputs, output)` saves what `formula(ctx, *grads)` needs, which returns a gradient
    for each input. The function is like `torch.library.register_autograd`, which would silently
    lose tangents.
    """
    op = getattr(torch.ops.qfx, name).default
    defaults = [argument.default_value for argument in schema(op).arguments]
    arguments = enumerate(schema(op).arguments)
    lists = [place for place, argument in arguments if _is_of_tensors(argument.type)]
    gives_list = any(_is_of_tensors(result.type) for result in schema(op).returns)

    def forward(ctx: Any, how: tuple[Any, int], *given: Any) -> Any:
        """Runs the operator below autograd. `how`: the keyset and the number of arguments. `given`:
        the arguments, then the tensors of those arguments that are lists, because autograd only
        tracks tensors that are arguments or results themselves."""
        keyset, count = how
        args, ctx.in_lists = given[:count], len(given) - count
        output = redispatch_below(op, keyset, args)
        # torch leaves out trailing arguments at their default
        setup(ctx, (*args, *defaults[count:]), output)
        return tuple(output) if gives_list else output

    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"qfx::{name} has no second derivative: {WHY_FIRST_ORDER}; call backward or grad "
                "with create_graph=False"
            )
        return None, *formula(ctx, *grads), *[None] * ctx.in_lists

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"BackwardOf_{name}", (torch.autograd.Function,), parts)

    def kernel(keyset: Any, *args: Any) -> Any:
        if in_forward_mode():
            refuse_tangents(f"qfx::{name}", args)
        in_lists = [t for place in lists for t in args[place] if t is not None]
        in_lists = in_lists if any_requires_grad(*in_lists) else []
        if torch.is_grad_enabled() and any_requires_grad(*args, *in_lists):
            output = function.apply((keyset, len(args)), *args, *in_lists)
            return list(output) if gives_list else output
        return redispatch_below(op, keyset, args)

    _AUTOGRAD.impl(name, kernel, "Autograd", with_keyset=True)


def _is_of_tensors(kind: Any) -> bool:
    """Whether this type is a list of tensors, some of which may be None."""
    return str(kind) in ("List[Tensor]", "List[Optional[Tensor]]")


INSTEAD = "use qfx::linear_ste where gradients are needed, as the qfx backend does by itself"


def no_gradient(name: str, instead: str = INSTEAD) -> None:
    """Makes a backward through the operator `name` raise an error that says what to use instead.
    Without this, PyTorch silently returns no gradient."""

    def formula(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"qfx::{name} is an inference operator and has no gradient. Run it under "
            f"torch.no_grad(), or {instead}."
        )

    gradient(name, lambda ctx, inputs, output: None, formula)
    NO_GRADIENT.append(name)


def refuse_tangents(what: str, arguments: Iterable[Any]) -> None:
    """Raises NotImplementedError if an argument carries a forward-mode tangent."""
    for i, argument in enumerate(arguments):
        if any(forward_ad.unpack_dual(t).tangent is not None for t in _tensors([argument])):
            raise NotImplementedError(
                f"{what}: argument {i} carries a forward-mode tangent, which int8 operators cannot "
                "propagate; run this computation in float"
            )
