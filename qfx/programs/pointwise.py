"""Instructions for pointwise functions, for means and for norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from qfx.programs.bytecode import UNARY, Operand
from qfx.programs.emit import EMIT, Emitter, Outside, argument

aten = torch.ops.aten


def _unary(name: str, e: Emitter, node: fx.Node) -> None:
    e.unary(name, e.of(node), e.of(node.args[0]))


def _gelu(e: Emitter, node: fx.Node) -> None:
    exact = argument(node, 1, "approximate", "none") == "none"
    _unary("gelu" if exact else "gelu_tanh", e, node)


def _binary(name: str, e: Emitter, node: fx.Node) -> None:
    out = e.of(node)
    a, b = (_float(e, operand) for operand in node.args[:2])
    e.binary(name, out, a, _times_alpha(e, node, b))


def _times_alpha(e: Emitter, node: fx.Node, x: Operand) -> Operand:
    alpha = argument(node, 2, "alpha", 1)
    return x if alpha == 1 else e.binary("mul", e.fresh(x.sizes), x, e.of(alpha))


def _reversed(name: str, e: Emitter, node: fx.Node) -> None:
    out = e.of(node)
    a, b = (_float(e, operand) for operand in node.args[:2])
    e.binary(name, out, b, _times_alpha(e, node, a))


def _float(e: Emitter, what: Any) -> Operand:
    """Returns an operand in float32, as PyTorch promotes operators of floats and integers."""
    source = e.of(what, None)
    if source.dtype == torch.float32:
        return source
    if source.dtype != torch.int64:
        raise Outside
    fresh = e.fresh(source.sizes)
    e("copy", fresh, source)
    return fresh


def _in_place(name: str, e: Emitter, node: fx.Node) -> None:
    out, b = e.of(node), e.of(node.args[1])
    e.binary(name, out, out, _times_alpha(e, node, b))


def _power(e: Emitter, node: fx.Node) -> None:
    out, x, exponent = e.of(node), e.of(node.args[0]), node.args[1]
    if isinstance(exponent, int | float) and exponent in _POWERS:
        _POWERS[exponent](e, out, x)
    else:
        e.binary("pow", out, x, _float(e, exponent))


# The same formulas as PyTorch's, so that zeros and infinities come out the same.
_POWERS: dict[float, Callable[[Emitter, Operand, Operand], Operand]] = {
    -1: lambda e, out, x: e.unary("reciprocal", out, x),
    -0.5: lambda e, out, x: e.unary("rsqrt", out, x),
    0.5: lambda e, out, x: e.unary("sqrt", out, x),
    2: lambda e, out, x: e.binary("mul", out, x, x),
}


def _square(e: Emitter, node: fx.Node) -> None:
    x = e.of(node.args[0])
    e.binary("mul", e.of(node), x, x)


def _mean(e: Emitter, node: fx.Node) -> None:
    out, x = e.of(node), e.whole(node.args[0])
    axes = argument(node, 1, "dim")
    of_last = axes in ([-1], [len(x.sizes) - 1]) and argument(node, 3, "dtype") is None
    if not of_last or 0 in x.sizes[-1:] or not x.sizes or not out.contiguous:
        raise Outside
    _mean_of(e, out, x)


def _mean_of(e: Emitter, out: Operand, x: Operand) -> Operand:
    e("mean", out.viewed((*x.sizes[:-1], 1)), x)
    return out


def _rms_norm(e: Emitter, node: fx.Node) -> None:
    x, shape = e.whole(node.args[0]), node.args[1]
    eps = argument(node, 3, "eps")
    _last_axis(shape)
    inverse = _inverse_size(e, x, torch.finfo(torch.float32).eps if eps is None else eps)
    out, weight = e.binary("mul", e.of(node), x, inverse), argument(node, 2, "weight")
    if weight is not None:
        e.binary("mul", out, out, e.of(weight))


def _layer_norm(e: Emitter, node: fx.Node) -> None:
    x, shape, out = e.whole(node.args[0]), node.args[1], e.of(node)
    _last_axis(shape)
    parts: list[Any] = []
    for place, name in ((2, "weight"), (3, "bias")):
        given = argument(node, place, name)
        parts += [0] if given is None else [1, e.whole(given)]
    to = out if out.contiguous else e.fresh(out.sizes)
    e("layer_norm", to, x, *parts, float(argument(node, 4, "eps", 1e-5)))
    if to is not out:
        e("copy", out, to)


def _last_axis(shape: Any) -> None:
    if len(shape) != 1:
        raise Outside


def _inverse_size(e: Emitter, x: Operand, eps: float) -> Operand:
    """Emits 1 / sqrt(mean(x^2) + eps), [.., 1]."""
    squares = e.binary("mul", e.fresh(x.sizes), x, x)
    size = _mean_of(e, e.fresh((*x.sizes[:-1], 1)), squares)
    size = e.binary("add", size, size, e.of(float(eps)))
    return e.unary("rsqrt", size, size)


def _product(e: Emitter, node: fx.Node) -> None:
    """Emits the product of a column and a row, for example of positions and frequencies."""
    a, b = (e.of(n) for n in node.args[:2])
    if len(a.sizes) < 2 or a.sizes[-1] != 1 or len(b.sizes) != len(a.sizes):
        raise Outside
    e.binary("mul", e.of(node), a, b)


EMIT |= {
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power,
    aten.square.default: _square,
    aten.mean.dim: _mean,
    aten.rms_norm.default: _rms_norm,
    aten.layer_norm.default: _layer_norm,
    aten.matmul.default: _product,
    aten.bmm.default: _product,
    aten.gelu.default: _gelu,
    aten.rsub.Scalar: partial(_reversed, "sub"),
    aten.rsub.Tensor: partial(_reversed, "sub"),
}
EMIT |= {
    getattr(aten, name).default: partial(_unary, name)
    for name in UNARY
    if name not in ("gelu", "gelu_tanh")
}
EMIT |= {
    getattr(getattr(aten, name), overload): partial(_binary, name)
    for name in ("add", "sub", "mul", "div")
    for overload in ("Tensor", "Scalar")
}
EMIT |= {
    getattr(aten, f"{name}_").Tensor: partial(_in_place, name)
    for name in ("add", "sub", "mul", "div")
}
EMIT |= {getattr(aten, name).default: partial(_binary, name) for name in ("maximum", "minimum")}
