"""Each operator that programs know, against PyTorch: bit for bit where it is exact, within a
derived bound of float64 elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qfx.programs.emit import EMIT
from tests.programs.traced import aten, built, same

HALF = 2.0**-24  # of a unit in the last place, relative
TINY = 2.0**-126
FLOAT = torch.float32
Draw = st.DrawFn
ops = torch.ops.qfx
# These have their own tests: test_linears.py, test_several_linears.py, test_caches.py,
# test_program_experts.py, test_program_attention.py.
ELSEWHERE = {
    *(getattr(aten, name).Tensor for name in ("add_", "sub_", "mul_", "div_")),
    ops.linear_dynamic.default,
    ops.linears.default,
    ops.kv_write.default,
    ops.kv_attention.default,
    ops.experts.default,
    ops.int8_attention.default,
    aten.scaled_dot_product_attention.default,
}


class Case(NamedTuple):
    """`bound(y, *inputs)`: how far results may be from y, those in float64; None: not at all."""

    f: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    bound: Callable[..., Tensor] | None = None


def _shape(draw: Draw, least: int = 0, most: int = 6) -> list[int]:
    axes = draw(st.integers(least, most))
    largest = {0: 9, 1: 40, 2: 9, 3: 5}.get(axes, 3)
    return [draw(st.integers(0 if draw(st.booleans()) else 1, largest)) for _ in range(axes)]


def _values(draw: Draw, shape: list[int], dtype: torch.dtype = FLOAT) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, shape, generator=generator)
    return torch.randn(shape, generator=generator) * draw(st.sampled_from([1.0, 1e-3, 30.0]))


class Operand(NamedTuple):
    """An input, and the view of it that an operator is given."""

    base: Tensor
    view: Callable[[Any], Any]

    @property
    def value(self) -> Tensor:
        return self.view(self.base)


def _operand(draw: Draw, shape: list[int], dtype: torch.dtype = FLOAT) -> Operand:
    kind = draw(st.sampled_from(["plain", "permuted", "expanded", "sliced", "selected"]))
    if not shape or kind == "plain":
        return Operand(_values(draw, shape, dtype), lambda x: x)
    axis = draw(st.integers(0, len(shape) - 1))
    if kind == "permuted":
        order = draw(st.permutations(range(len(shape))))
        base = _values(draw, [shape[i] for i in order], dtype)
        back = [order.index(i) for i in range(len(shape))]
        return Operand(base, lambda x: aten.permute.default(x, back))
    if kind == "expanded":
        base = _values(draw, [1 if i == axis else n for i, n in enumerate(shape)], dtype)
        return Operand(base, lambda x: aten.expand.default(x, shape))
    if kind == "sliced":
        step, n = draw(st.integers(1, 2)), shape[axis]
        wide = [2 + step * n if i == axis else m for i, m in enumerate(shape)]
        end = 1 + step * n
        return Operand(
            _values(draw, wide, dtype), lambda x: aten.slice.Tensor(x, axis, 1, end, step)
        )
    base = _values(draw, [*shape[:axis], 3, *shape[axis:]], dtype)
    return Operand(base, lambda x: aten.select.int(x, axis, 1))


def _broadcast(draw: Draw, shape: list[int]) -> list[int]:
    """One that broadcasts to it."""
    some = [1 if draw(st.integers(0, 3)) == 0 else n for n in shape]
    return some[draw(st.integers(0, len(shape))) if draw(st.booleans()) else 0 :]


def _relative(units: float, tiny: float = TINY) -> Callable[..., Tensor]:
    return lambda y, *_: units * 2 * HALF * y.abs() + tiny


# erf and tanh are off by 2 HALF where they are near 1, their arguments by so little that it adds as
# much, and 1 + them is rounded: 4 HALF, times x.
def _gelu_bound(y: Tensor, x: Tensor) -> Tensor:
    return 4 * HALF * x.abs() + 2 * HALF * y.abs() + TINY


# C's functions are right to 1 unit, tanh to 2. A sigmoid adds roundings of a sum and a quotient.
UNARY: dict[str, Any] = {
    "neg": None, "abs": None, "relu": None, "reciprocal": None,
    "sqrt": _relative(0.5), "rsqrt": _relative(1.5), "exp": _relative(1), "tanh": _relative(2),
    "cos": _relative(1), "sin": _relative(1), "sigmoid": _relative(2.5),
    "silu": lambda y, x: 6 * HALF * y.abs() + TINY * (1 + x.abs()),
}  # fmt: skip


def _unary(target: Any, bound: Any, draw: Draw) -> Case:
    x = _operand(draw, _shape(draw))
    return Case(
        lambda a: target(x.view(a)), (x.base,), bound and (lambda y, a: bound(y, x.view(a)))
    )


def _gelu(draw: Draw) -> Case:
    x, how = _operand(draw, _shape(draw)), draw(st.sampled_from(["none", "tanh"]))
    f = lambda a: aten.gelu.default(x.view(a), approximate=how)  # noqa: E731
    return Case(f, (x.base,), lambda y, a: _gelu_bound(y, x.view(a)))


def _pair(draw: Draw, second: torch.dtype = FLOAT) -> tuple[Operand, Operand]:
    shape = _shape(draw)
    pair = _operand(draw, _broadcast(draw, shape)), _operand(draw, _broadcast(draw, shape), second)
    return pair if second != FLOAT or draw(st.booleans()) else pair[::-1]


NUMBERS = st.sampled_from([0.0, -0.0, 1, 2.5, -3, 1e300, 16777217, math.inf, math.nan, True])
ALPHAS = st.sampled_from([1, 1, 1.0, 2, -0.3])


def _binary(target: Any, number: bool, reversed_: bool, draw: Draw) -> Case:
    alpha = draw(ALPHAS) if target._schema.arguments[-1].name == "alpha" else 1
    how = {} if alpha == 1 else {"alpha": alpha}
    a, b = _pair(draw, draw(st.sampled_from([FLOAT, torch.int64])))
    if number or draw(st.integers(0, 3)) == 0:
        c = draw(NUMBERS)
        case = Case(lambda x: target(a.view(x), c, **how), (a.base,))
        pair = lambda x: (a.view(x), torch.tensor(c, dtype=FLOAT))  # noqa: E731
    else:
        case = Case(lambda x, y: target(a.view(x), b.view(y), **how), (a.base, b.base))
        pair = lambda x, y: (a.view(x), b.view(y))  # noqa: E731
    if alpha == 1:
        return case

    def bound(y: Tensor, *inputs: Tensor) -> Tensor:  # alpha, its product, the sum are rounded
        first, second = (v.double().abs() for v in pair(*inputs))
        scaled, plain = (first, second) if reversed_ else (second, first)
        return 4 * HALF * (scaled * abs(alpha) + plain) + TINY

    return case._replace(bound=bound)


def _extreme(target: Any, draw: Draw) -> Case:
    a, b = _pair(draw)
    f = lambda x, y: target(a.view(x), b.view(y))  # noqa: E731
    spoiled = torch.where(torch.rand(a.base.shape) < 0.2, math.nan, a.base)
    return Case(f, (spoiled, b.base))


EXACT_POWERS = (2, 2.0, -1, 0.5, 1)


def _power(tensor: bool, draw: Draw) -> Case:
    a, b = _pair(draw)
    positive = a.base.abs().clamp(0.1, 10), b.base.clamp(-3, 3)
    if tensor:
        f = lambda x, y: aten.pow.Tensor_Tensor(a.view(x), b.view(y))  # noqa: E731
        return Case(f, positive, _relative(1.5))
    exponent = draw(st.sampled_from([*EXACT_POWERS, -0.5, 3, -2, 0, 1.7, -4]))
    base = positive[0] if exponent not in EXACT_POWERS else a.base
    bound = None if exponent in EXACT_POWERS else _relative(1.5)
    return Case(lambda x: aten.pow.Tensor_Scalar(a.view(x), exponent), (base,), bound)


def _mean(draw: Draw) -> Case:
    x, keep = _operand(draw, [*_shape(draw, 0, 5), draw(st.integers(1, 70))]), draw(st.booleans())
    axis = [draw(st.sampled_from([-1, x.value.ndim - 1]))]
    n = x.value.shape[-1]
    bound = lambda y, a: (n + 2) * HALF * x.view(a).abs().mean(-1, keepdim=keep) + TINY  # noqa: E731
    return Case(lambda a: aten.mean.dim(x.view(a), axis, keep), (x.base,), bound)


def _rms_norm(draw: Draw) -> Case:
    x = _operand(draw, [*_shape(draw, 0, 5), draw(st.integers(1, 70))])
    n, eps = x.value.shape[-1], draw(st.sampled_from([None, 1e-6, 0.1]))
    w = [_values(draw, [n])] if draw(st.booleans()) else []

    def f(a: Any, weight: Any = None) -> Any:
        of_float = isinstance(a, Tensor) and eps is None  # whose eps that of float64 is not
        small = torch.finfo(FLOAT).eps if of_float else eps
        return aten.rms_norm.default(x.view(a), [n], weight, small)

    # The mean of squares by n roundings, of which the root has half; then 8 more.
    bound = lambda y, *_: (n / 2 + 8) * HALF * y.abs() + TINY  # noqa: E731
    return Case(f if w else lambda a: f(a), (x.base, *w), bound)


def _layer_norm(draw: Draw) -> Case:
    x = _operand(draw, [*_shape(draw, 0, 5), draw(st.integers(1, 70))])
    n, eps = x.value.shape[-1], draw(st.sampled_from([1e-5, 0.1]))
    w, b = _values(draw, [n]), _values(draw, [n])

    def bound(y: Tensor, a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        v = x.view(a)
        centered = v - v.mean(-1, keepdim=True)
        inverse = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
        off = 2 * (n + 2) * HALF * v.abs().amax(-1, keepdim=True)  # of the centered ones
        normal = (centered * inverse).abs()
        error = inverse * off + normal * (inverse * off + (n / 2 + 8) * HALF)
        return 2 * w.abs() * error + 2 * HALF * (y.abs() + b.abs()) + TINY

    f = lambda a, w, b: aten.layer_norm.default(x.view(a), [n], w, b, eps)  # noqa: E731
    return Case(f, (x.base, w, b), bound)


def _product(target: Any, draw: Draw) -> Case:
    batch = [draw(st.integers(0, 4))] if target is aten.bmm.default else _shape(draw, 0, 4)
    m, n = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    a, b = _operand(draw, [*batch, m, 1]), _operand(draw, [*batch, 1, n])
    return Case(lambda x, y: target(a.view(x), b.view(y)), (a.base, b.base))


def _of_each(f: Callable[..., Any], parts: list[Operand]) -> Case:
    names = ", ".join(f"x{i}" for i in range(len(parts)))  # each an input of its own
    return Case(eval(f"lambda {names}: f({names})", {"f": f}), tuple(p.base for p in parts))


def _cat(draw: Draw) -> Case:
    shape = _shape(draw, 1)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        sizes = list(shape)
        sizes[axis] = draw(st.integers(0, 4))
        parts.append(_operand(draw, sizes))
    f = lambda *xs: aten.cat.default([p.view(x) for p, x in zip(parts, xs, strict=True)], axis)  # noqa: E731
    return _of_each(f, parts)


def _embedding(draw: Draw) -> Case:
    table = _operand(draw, [draw(st.integers(1, 9)), draw(st.integers(0, 40))])
    at = _operand(draw, _shape(draw, 0, 5), torch.int64)
    rows = at.base % table.value.shape[0]
    f = lambda t, i: aten.embedding.default(table.view(t), at.view(i))  # noqa: E731
    return Case(f, (table.base, rows))


def _stack(draw: Draw) -> Case:
    shape = _shape(draw, 0, 5)
    axis = draw(st.integers(-len(shape) - 1, len(shape)))
    a, b = _operand(draw, shape), _operand(draw, shape)
    return Case(lambda x, y: aten.stack.default([a.view(x), b.view(y)], axis), (a.base, b.base))


def _interleave(draw: Draw) -> Case:
    x = _operand(draw, _shape(draw, 1, 5))
    axis = draw(st.integers(-x.value.ndim, x.value.ndim - 1))
    times = draw(st.integers(1, 4))
    return Case(lambda a: aten.repeat_interleave.self_int(x.view(a), times, axis), (x.base,))


def _index(draw: Draw) -> Case:
    x = _operand(draw, [draw(st.integers(1, 4)) for _ in range(3)])
    at = _operand(draw, _shape(draw, 1, 1), torch.int64)
    places = at.base % x.value.shape[1]
    f = lambda a, i: aten.index.Tensor(x.view(a), [None, at.view(i)])  # noqa: E731
    return Case(f, (x.base, places))


DTYPES = st.sampled_from([FLOAT, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])


def _typed(draw: Draw, target: Any, *arguments: Any, **named: Any) -> Case:
    x, dtype = _operand(draw, _shape(draw)), draw(DTYPES)
    base = (x.base * 50).to(dtype)
    return Case(lambda a: target(x.view(a), *arguments, **named), (base,))


def _converted(draw: Draw, target: Any, *arguments: Any, **named: Any) -> Case:
    x = _operand(draw, _shape(draw), draw(st.sampled_from([FLOAT, torch.int64])))
    return Case(lambda a: target(x.view(a), *arguments, **named), (x.base,))


def _as_bool(draw: Draw) -> Case:
    x = _operand(draw, _shape(draw), torch.int64)
    base = torch.where(torch.rand(x.base.shape) < 0.5, 0, x.base)
    return Case(lambda a: aten.to.dtype(x.view(a), torch.bool), (base,))


def _reshape(target: Any, draw: Draw) -> Case:
    x, dtype = _operand(draw, _shape(draw, 1)), draw(DTYPES)
    arguments = (0, -1) if target is aten.flatten.using_ints else ([x.value.numel()],)
    return Case(lambda a: target(x.view(a), *arguments), ((x.base * 50).to(dtype),))


def _linear(draw: Draw) -> Case:
    k, n = draw(st.integers(1, 70)), draw(st.integers(1, 40))
    x, w = _operand(draw, [*_shape(draw, 0, 5), k]), _operand(draw, [n, k])
    b = [_values(draw, [n])] if draw(st.booleans()) else []

    def bound(y: Tensor, a: Tensor, c: Tensor, *bias: Tensor) -> Tensor:  # k sums, one more
        return (k + 2) * HALF * aten.linear(
            x.view(a).abs(), w.view(c).abs(), *map(abs, bias)
        ) + TINY

    if not b:
        return Case(lambda a, c: aten.linear.default(x.view(a), w.view(c)), (x.base, w.base), bound)
    f = lambda a, c, d: aten.linear.default(x.view(a), w.view(c), d)  # noqa: E731
    return Case(f, (x.base, w.base, *b), bound)


def _rows(draw: Draw) -> Operand:
    return _operand(draw, [*_shape(draw, 0, 5), draw(st.integers(1, 70))])


def _last(draw: Draw, x: Operand) -> int:
    return draw(st.sampled_from([-1, x.value.ndim - 1]))


# Below e^-80 of the greatest all is 0. Exponents are rounded, so results are off by their size.
def _softmax_bound(y: Tensor, x: Tensor) -> Tensor:
    n, far = x.shape[-1], x.amax(-1, keepdim=True) - x
    return (n + 12 + 2 * far) * HALF * y + math.exp(-79)


def _softmax(draw: Draw) -> Case:
    x = _rows(draw)
    f, axis = aten.softmax.int, _last(draw, x)
    base = x.base.clone()
    if base.numel() and draw(st.booleans()):
        base.view(-1)[0] = draw(st.sampled_from([math.inf, -math.inf, math.nan, 1e30]))
    return Case(lambda a: f(x.view(a), axis), (base,), lambda y, a: _softmax_bound(y, x.view(a)))


def _sum(draw: Draw) -> Case:
    x, keep = _rows(draw), draw(st.booleans())
    axis, n = [_last(draw, x)], x.value.shape[-1]
    bound = lambda y, a: (n + 1) * HALF * x.view(a).abs().sum(-1, keepdim=keep) + TINY  # noqa: E731
    return Case(lambda a: aten.sum.dim_IntList(x.view(a), axis, keep), (x.base,), bound)


def _top_k(draw: Draw) -> Case:
    """Draws which part of the result; which of equal elements comes first PyTorch leaves open."""
    x, part = _rows(draw), draw(st.integers(0, 1))
    k = draw(st.integers(0, x.value.shape[-1]))
    base = torch.randperm(x.base.numel()).float().view(x.base.shape) if part else x.base
    if not part and base.numel() and draw(st.booleans()):
        base = base.clone()
        base.view(-1)[0] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    axis = _last(draw, x)
    if part and x.view(base).unique().numel() < x.value.numel():
        part = 0  # an operand that is expanded
    return Case(lambda a: aten.topk.default(x.view(a), k, axis)[part], (base,))


def _indices(draw: Draw, x: Operand) -> Tensor:
    sizes = [*x.value.shape[:-1], draw(st.integers(0, 5))]
    return torch.randint(0, x.value.shape[-1], sizes)


def _gather(draw: Draw) -> Case:
    x = _rows(draw)
    axis = _last(draw, x)
    base = x.base if draw(st.booleans()) else (x.base * 50).to(torch.int64)
    f = lambda a, i: aten.gather.default(x.view(a), axis, i)  # noqa: E731
    return Case(f, (base, _indices(draw, x)))


def _scatter(target: Any, draw: Draw) -> Case:
    x, value = _rows(draw), draw(st.sampled_from([1, 0.0, -2.5, math.inf]))
    axis = _last(draw, x)
    whole = {"memory_format": torch.contiguous_format}
    writes = target is aten.scatter_.value
    own = (lambda a: aten.clone.default(a, **whole)) if writes else lambda a: a
    f = lambda a, i: target(own(x.view(a)), axis, i, value)  # noqa: E731
    return Case(f, (x.base, _indices(draw, x)))


def _masked_fill(draw: Draw) -> Case:
    shape = _shape(draw)
    x, m = _operand(draw, shape), _operand(draw, _broadcast(draw, shape))
    value = draw(st.sampled_from([0.0, -math.inf, 3]))
    base = (m.base > 0).float() * 2.5
    as_bool = lambda c: aten.to.dtype(m.view(c), torch.bool)  # noqa: E731
    masks = {
        "floats": as_bool,
        "not floats": lambda c: aten.bitwise_not.default(as_bool(c)),
        "none of floats": lambda c: aten.logical_not.default(as_bool(c)),
        "bools": m.view,
    }
    kind = draw(st.sampled_from(list(masks)))
    mask = base != 0 if kind == "bools" else base
    f = lambda a, c: aten.masked_fill.Scalar(x.view(a), masks[kind](c), value)  # noqa: E731
    return Case(f, (x.base, mask))


def _clamp(draw: Draw) -> Case:
    x = _operand(draw, _shape(draw))
    limits = draw(st.sampled_from([(-0.5, None), (None, 0.25), (-1, 1), (0.5, -0.5)]))
    spoiled = torch.where(torch.rand(x.base.shape) < 0.2, math.nan, x.base)
    return Case(lambda a: aten.clamp.default(x.view(a), *limits), (spoiled,))


CPU = torch.device("cpu")
ROWS: dict[Any, Callable[[Draw], Case]] = {
    aten.gelu.default: _gelu,
    aten.square.default: partial(_unary, aten.square.default, None),
    aten.pow.Tensor_Scalar: partial(_power, False),
    aten.pow.Tensor_Tensor: partial(_power, True),
    aten.mean.dim: _mean,
    aten.rms_norm.default: _rms_norm,
    aten.layer_norm.default: _layer_norm,
    aten.matmul.default: partial(_product, aten.matmul.default),
    aten.bmm.default: partial(_product, aten.bmm.default),
    aten.linear.default: _linear,
    aten.softmax.int: _softmax,
    aten.sum.dim_IntList: _sum,
    aten.topk.default: _top_k,
    aten.gather.default: _gather,
    aten.scatter.value: partial(_scatter, aten.scatter.value),
    aten.scatter_.value: partial(_scatter, aten.scatter_.value),
    aten.masked_fill.Scalar: _masked_fill,
    aten.clamp.default: _clamp,
    aten.zeros_like.default: partial(_unary, aten.zeros_like.default, None),
    aten.cat.default: _cat,
    aten.embedding.default: _embedding,
    aten.stack.default: _stack,
    aten.repeat_interleave.self_int: _interleave,
    aten.index.Tensor: _index,
    aten.maximum.default: partial(_extreme, aten.maximum.default),
    aten.minimum.default: partial(_extreme, aten.minimum.default),
    aten.clone.default: lambda draw: _typed(draw, aten.clone.default),
    aten.contiguous.default: lambda draw: _typed(draw, aten.contiguous.default),
    aten.reshape.default: partial(_reshape, aten.reshape.default),
    aten.flatten.using_ints: partial(_reshape, aten.flatten.using_ints),
    aten.to.dtype: lambda draw: (
        _as_bool(draw)
        if draw(st.booleans())
        else _converted(draw, aten.to.dtype, FLOAT, False, True)
    ),
    aten.to.device: lambda draw: _converted(draw, aten.to.device, CPU, FLOAT, False, True),
    aten.to.dtype_layout: lambda draw: _converted(
        draw, aten.to.dtype_layout, dtype=FLOAT, copy=True
    ),
    aten._to_copy.default: lambda draw: _converted(draw, aten._to_copy.default, dtype=FLOAT),
}
ROWS |= {
    getattr(aten, name).default: partial(_unary, getattr(aten, name).default, bound)
    for name, bound in UNARY.items()
}
ROWS |= {
    getattr(getattr(aten, name), overload): partial(
        _binary, getattr(getattr(aten, name), overload), overload == "Scalar", name == "rsub"
    )
    for name in ("add", "sub", "mul", "div", "rsub")
    for overload in ("Tensor", "Scalar")
}


def test_each_operator_has_a_row() -> None:
    assert set(EMIT) == set(ROWS) | ELSEWHERE


@pytest.mark.parametrize("target", ROWS, ids=str)
@settings(max_examples=max(settings().max_examples // 4, 10))
@given(data=st.data())
def test_results_are_pytorchs(target: Any, data: st.DataObject) -> None:
    case = ROWS[target](data.draw)
    exact = case.bound is None
    wide = [x.double() if x.is_floating_point() else x for x in case.inputs]
    try:
        expected = case.f(*(case.inputs if exact else wide))
    except RuntimeError:  # a number that is no float's argument, as of rsub with a bool
        return
    if expected.dtype not in (FLOAT, torch.float64) and target not in EMIT:
        return
    runner = built(case.f, case.inputs)
    (found,) = runner(*case.inputs)
    if expected.dtype == FLOAT or exact:
        assert same(found, expected), (found, expected)
    else:
        off = (found.double() - expected).abs()
        same_kind = (found == expected.float()) | found.isnan() & expected.isnan()
        near = (off <= case.bound(expected, *wide)) | same_kind  # type: ignore[misc]
        assert bool(near.all()), (found, expected)
    assert runner.outside == []
