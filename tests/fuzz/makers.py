"""Makers of the fuzz grammar: each finds or makes operands of the right shapes in a draft.

They return a name or expression for every placeholder of an operation's text, or None when the
draft has no such operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from tests.fuzz.draft import Draft

Arguments = Mapping[str, str]
Make = Callable[["Draft"], "Arguments | None"]


def any_of(test: Callable[[Tensor], bool] = lambda t: True) -> Make:
    return lambda d: d.named(x=d.pick(test))


def rank(n: int) -> Callable[[Tensor], bool]:
    return lambda t: t.ndim == n


def same_shapes(d: Draft) -> Arguments | None:
    x = d.some()
    y = d.pick(lambda t: t.shape == d.real[x].shape)
    return d.named(x=x, y=y)


def broadcast(d: Draft) -> Arguments | None:
    """x and something narrower of its type: a parameter [N] or a scalar's worth of sizes."""
    x = d.some()
    t = d.real[x]
    shape = d.rng.choice([t.shape[-1:], t.shape[-2:], (1,) * t.ndim])
    return d.named(x=x, y=d.constant(shape, t.dtype))


def narrow(d: Draft) -> Arguments | None:
    x = d.pick(lambda t: t.shape[-1] > 1)
    return None if x is None else {"x": x, **_range(d, x)}


def _range(d: Draft, x: str) -> dict[str, str]:
    size = d.real[x].shape[-1]
    start = d.rng.randrange(size - 1)
    return {"I": str(start), "J": str(d.rng.randrange(start + 1, size + 1))}


def dim(test: Callable[[Tensor], bool] = lambda t: True) -> Make:
    def make(d: Draft) -> Arguments | None:
        x = d.pick(test)
        return None if x is None else {"x": x, "DIM": str(d.rng.randrange(-d.real[x].ndim, 0))}

    return make


def two_dims(d: Draft) -> Arguments | None:
    x = d.pick(lambda t: t.ndim > 1)
    if x is None:
        return None
    first, second = d.rng.sample(range(d.real[x].ndim), 2)
    return {"x": x, "I": str(first), "J": str(second)}


def order(d: Draft) -> Arguments | None:
    x = d.pick(lambda t: t.ndim > 1)
    if x is None:
        return None
    dims = d.rng.sample(range(d.real[x].ndim), d.real[x].ndim)
    return {"x": x, "DIMS": ", ".join(map(str, dims))}


def split_last(d: Draft) -> Arguments | None:
    """A factorisation of the last axis, as heads."""
    x = d.pick(lambda t: t.ndim < 4 and t.is_contiguous())
    if x is None:
        return None
    *rest, last = d.real[x].shape
    heads = d.rng.choice([h for h in range(1, last + 1) if last % h == 0])
    return {"x": x, "SHAPE": ", ".join(map(str, [*rest, heads, last // heads]))}


def fold(test: Callable[[Tensor], bool]) -> Make:
    """All elements in two axes."""

    def make(d: Draft) -> Arguments | None:
        x = d.pick(lambda t: t.ndim > 1 and test(t))
        if x is None:
            return None
        sizes = d.real[x].shape
        at = d.rng.randrange(1, len(sizes))
        return {"x": x, "I": str(math.prod(sizes[:at])), "J": str(math.prod(sizes[at:]))}

    return make


def masked(d: Draft) -> Arguments | None:
    arguments = same_shapes(d)
    if arguments is None:
        return None
    return {**arguments, "MASK": d.mask(d.real[arguments["x"]].shape)}


def indexed(d: Draft) -> Arguments | None:
    x = d.pick(lambda t: t.ndim > 1)
    return None if x is None else {"x": x, "INDEX": d.index(d.real[x].shape[0])}


def weight_and_bias(d: Draft) -> Arguments | None:
    x = d.some()
    size, dtype = d.real[x].shape[-1:], d.real[x].dtype
    return d.named(x=x, w=d.constant(size, dtype), b=d.constant(size, dtype))


def linear(
    layout: str, test: Callable[[Tensor], bool] = lambda t: True, bias: bool = False
) -> Make:
    """x and a weight of `LAYOUTS`, perhaps a bias [N]."""

    def make(d: Draft) -> Arguments | None:
        axis, sizes = LAYOUTS[layout]
        x = d.pick_shared(lambda t: t.ndim >= -axis and t.ndim > axis and test(t))
        if x is None:
            return None
        t = d.real[x]
        n, w = d.weight({n: sizes(n, t.shape[axis]) for n in d.widths()}, t.dtype)
        return d.named(x=x, w=w, **({"b": d.constant((n,), t.dtype)} if bias else {}))

    return make


# layout of a weight -> the axis of x that is K, and the weight's shape
LAYOUTS: dict[str, tuple[int, Callable[[int, int], tuple[int, ...]]]] = {
    "nk": (-1, lambda n, k: (n, k)),
    "kn": (-1, lambda n, k: (k, n)),
    "left": (-2, lambda n, k: (n, k)),
    "conv1d": (1, lambda n, k: (n, k, 1)),
    "conv2d": (1, lambda n, k: (n, k, 1, 1)),
    "patches": (1, lambda n, k: (n, k, 1, 2)),
    "heads": (-1, lambda n, k: (n, 3, k)),
}


def matrix_bias(d: Draft) -> Arguments | None:
    arguments = linear("kn", rank(2))(d)
    if arguments is None:
        return None
    m, n = d.real[arguments["x"]].shape[0], d.evaluate(arguments["w"]).shape[1]
    dtype = d.real[arguments["x"]].dtype
    b = d.pick(lambda t: t.shape == (m, n) and t.dtype == dtype) or d.constant((m, n), dtype)
    return {**arguments, "b": b}


def two_activations(test: Callable[[Tensor], bool] = lambda t: True) -> Make:
    def make(d: Draft) -> Arguments | None:
        x = d.pick(lambda t: t.ndim >= 2 and test(t))
        fits = [n for n in d.names if x and _multiplies(d.real[x], d.real[n])]
        if x is None or not fits:
            return None
        y = d.rng.choice(fits)
        return {"x": x, "w": y if d.real[y].shape[-2] == d.real[x].shape[-1] else f"{y}.mT"}

    return make


def three_activations(d: Draft) -> Arguments | None:
    found = two_activations(rank(3))(d)
    if found is None:
        return None
    x, w = d.real[found["x"]], d.evaluate(found["w"])
    return d.named(**found, b=d.constant((x.shape[0], 1, w.shape[-1]), x.dtype))


def _multiplies(t: Tensor, w: Tensor) -> bool:
    same = w.ndim == t.ndim and w.shape[:-2] == t.shape[:-2] and w.dtype == t.dtype
    return same and t.shape[-1] in w.shape[-2:]


def attended(d: Draft) -> Arguments | None:
    q = d.pick(lambda t: t.ndim in (3, 4))
    if q is None:
        return None
    k = d.pick(lambda o: _alike_but_for(o, d.real[q], -2))
    v = k and d.pick(lambda o: _alike_but_for(o, d.real[k], -1))
    return d.named(q=q, k=k, v=v)


def _alike_but_for(t: Tensor, other: Tensor, axis: int) -> bool:
    """One type and shape, of any size along `axis`."""
    shapes = [[s for i, s in enumerate(x.shape) if i != x.ndim + axis] for x in (t, other)]
    return t.dtype == other.dtype and t.ndim == other.ndim and shapes[0] == shapes[1]


def attended_in_part(d: Draft) -> Arguments | None:
    found = attended(d)
    if found is None:
        return None
    m, n = (d.real[found[name]].shape[-2] for name in "qk")
    return {**found, "mask": d.mask((m, n), full=d.rng.randrange(n))}


def attended_but_for_large_keys(d: Draft) -> Arguments | None:
    """Some keys are seen by no row, and 10 to 10^4 times as large."""
    found = attended(d)
    if found is None:
        return None
    m, n = (d.real[found[name]].shape[-2] for name in "qk")
    return {**found, **d.mask_and_large(m, n, d.real[found["k"]].dtype)}


def attended_before_large_keys(d: Draft) -> Arguments | None:
    """The last key is seen by a row of its own: what is appended is seen by none."""
    found = attended(d)
    if found is None or d.real[found["q"]].shape[-2] > d.real[found["k"]].shape[-2]:
        return None
    return {**found, "FACTOR": d.rng.choice(("10", "1000", "1e4"))}


def attended_by_pairs(d: Draft) -> Arguments | None:
    """Of heads that are an axis of their own: further calls have another first axis."""
    found = attended(d)
    shape = d.real[found["q"]].shape if found else ()
    return found if len(shape) > 3 and shape[-3] % 2 == 0 else None


def writable(test: Callable[[Tensor], bool] = lambda t: True) -> Make:
    return lambda d: d.named(x=d.pick_writable(test))


def overwritten(operand: str) -> Make:
    """x is written; y, apart from it in memory, has the same shape or type as `operand` says."""

    def make(d: Draft) -> Arguments | None:
        x = d.pick_writable()
        y = x and d.pick(lambda t: d.apart(t, d.real[x]) and (
            operand == "any type" or t.dtype == d.real[x].dtype
        ))  # fmt: skip
        return d.named(x=x, y=y)

    return make


def overwritten_slice(d: Draft) -> Arguments | None:
    arguments = overwritten("same type")(d)
    if arguments is None or d.real[arguments["x"]].shape[-1] < 2:
        return None
    return {**arguments, **_range(d, arguments["x"])}


def output(d: Draft) -> Arguments | None:
    """x, y and z of one shape and type, z apart from both and contiguous."""
    z = d.pick_writable(lambda t: t.is_contiguous())
    if z is None:
        return None
    t = d.real[z]
    x, y = (d.pick(lambda o: d.apart(o, t) and o.dtype == t.dtype) for _ in "xy")
    return d.named(z=z, x=x, y=y)


def state(d: Draft) -> Arguments | None:
    """A buffer that the program changes, often one that is a weight."""
    return d.named(x=d.changing_buffer())


def converted(d: Draft) -> Arguments | None:
    x = d.some()
    return {"x": x, "DTYPE": d.another_dtype(d.real[x].dtype)}


def expanded(d: Draft) -> Arguments | None:
    x = d.pick(lambda t: t.ndim < 4)
    return None if x is None else {"x": x, "STAR": ", ".join(["-1"] * d.real[x].ndim)}


def split_one(d: Draft) -> Arguments | None:
    x = d.pick(lambda t: t.shape[-1] > 1)
    return None if x is None else {"x": x, "REST": str(d.real[x].shape[-1] - 1)}


def alike(d: Draft) -> Arguments | None:
    """One shape and type."""
    x = d.some()
    t = d.real[x]
    return d.named(x=x, y=d.pick(lambda o: o.shape == t.shape and o.dtype == t.dtype))
