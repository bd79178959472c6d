"""Linears that share an input: run separately by `linear_dynamic`, and together by `linears`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from qfx.graph.activations import ACTIVATIONS
from qfx.ops.code import Code
from qfx.ops.layout import Layout

ops = torch.ops.qfx
F32 = torch.float32


class Weight(NamedTuple):
    """A packed weight, its layout, and the epilogue of its sums."""

    packed: Tensor
    layout: Layout
    bias: Tensor | None = None
    activation: str = "none"


class Weights:
    """A generator of random weights with `k` columns. `g`: the random generator."""

    def __init__(self, seed: int, k: int) -> None:
        self.g, self.k = torch.Generator().manual_seed(seed), k

    def codes(self, low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high + 1, sizes, generator=self.g, dtype=torch.int8)

    def int8(self, n: int, most: int = 127) -> Weight:
        codes, scale = self.codes(-most, most, n, self.k), torch.rand(n, generator=self.g)
        return Weight(ops.pack_weight.default(codes, scale), Layout(n))

    def in_groups(self, n: int, group: int, shift: str, bits: int = 4) -> Weight:
        each = (n, -(-self.k // group))
        scale, minimum = torch.rand(2, *each, generator=self.g).bfloat16().float()
        zero = self.codes(-8, 7, *each).int()
        shifts = (zero if shift == "zero" else None, minimum if shift == "minimum" else None)
        codes = self.codes(-8, 7, n, self.k)
        packed = ops.pack_weight.default(codes, scale, *shifts, bits, group)
        return Weight(packed, Layout(n, bits, group, group, int(shift != "none")))


class Case(NamedTuple):
    """An input, and the weights that multiply it."""

    x: Tensor
    weights: tuple[Weight, ...]
    code: list[int]
    factor: Tensor | None = None
    out_dtype: torch.dtype = F32


def alone(case: Case, x: Any = None) -> list[Any]:
    """Runs one call for each weight. `x`: an input to use instead of the case's."""
    x = case.x if x is None else x
    end: Any = (case.out_dtype, case.factor)
    return [
        ops.linear_dynamic.default(
            x, w.packed, list(w.layout), w.bias, case.code, w.activation, *end
        )
        for w in case.weights
    ]


def together(case: Case, x: Any = None) -> list[Any]:
    """Runs one call for all weights; in a graph each result is a node of its own."""
    packed, layouts, biases, activations = zip(*case.weights, strict=True)
    numbers = [number for layout in layouts for number in layout]
    end: Any = (case.code, list(activations), case.out_dtype, case.factor)
    x = case.x if x is None else x
    every = ops.linears.default(x, list(packed), numbers, list(biases), *end)
    return [every[i] for i in range(len(packed))]


def drawn_case(draw: Callable[[Any], Any], dtypes: tuple[torch.dtype, ...] = (F32,)) -> Case:
    """Draws narrow and wide weights, groups, low bits and shifts, which need x in different
    forms."""
    k = draw(st.sampled_from([1, 20, 64, 192]))
    of, group = Weights(draw(st.integers(0, 99)), k), draw(st.sampled_from([0, 0, 32, 64]))
    code = Code(
        bits=draw(st.integers(2, 8)),
        symmetric=draw(st.sampled_from([0, 1])),
        per_tensor=0 if group else draw(st.sampled_from([0, 1])),
        group=group,
        rotation=64 if k % 64 == 0 and draw(st.booleans()) else 0,
    )
    weights = tuple(_weight(draw, of, group, dtypes) for _ in range(draw(st.integers(1, 5))))
    x = torch.randn(draw(st.sampled_from([0, 1, 3, 8, 40])), k, generator=of.g)
    factor = torch.rand(k, generator=of.g) + 0.5 if draw(st.booleans()) else None
    given, out = (draw(st.sampled_from(dtypes)) for _ in range(2))
    return Case(x.to(given), weights, list(code), factor, out)


def _weight(
    draw: Callable[[Any], Any], of: Weights, group: int, dtypes: tuple[torch.dtype, ...]
) -> Weight:
    kinds = ["none", "zero", "minimum", "int8 none", "int8 zero"]
    kinds += [] if group else ["int8", "narrow"]
    kind, n = draw(st.sampled_from(kinds)), draw(st.sampled_from([0, 1, 31, 32, 70]))
    if kind in ("int8", "narrow"):
        w = of.int8(n, 127 if kind == "int8" else 63)
    else:
        size, bits = group or draw(st.sampled_from([32, 64])), 8 if "int8" in kind else 4
        w = of.in_groups(n, size, kind.removeprefix("int8 "), bits)
    bias = torch.randn(n, generator=of.g).to(draw(st.sampled_from(dtypes)))
    given = bias if draw(st.booleans()) else None
    return w._replace(bias=given, activation=draw(st.sampled_from(list(ACTIVATIONS))))
