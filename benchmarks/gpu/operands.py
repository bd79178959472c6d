"""Operands of linears: random, with enough copies of the weights that no cache holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.clock import Call
from benchmarks.gpu.session import Session
from qfx.ops.code import Code
from qfx.ops.layout import layout_of
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec
from qfx.weights.cache import pack

OPS = torch.ops.qfx
GROUPS = Packing(QSpec(bits=4, group=64))
ROWS = Packing(QSpec())
ASYMMETRIC = list(Code(symmetric=0))


@dataclass(frozen=True)
class Linear:
    """The operands of x [m, k] @ w [n, k].T: float, and the codes of both."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    codes: tuple[Tensor, Tensor, Tensor]
    weight: Tensor
    layout: list[int]

    @classmethod
    def random(
        cls,
        session: Session,
        m: int,
        k: int,
        n: int,
        dtype: torch.dtype = torch.bfloat16,
        packing: Packing = ROWS,
        bias: bool = False,
    ) -> Linear:
        x, w = session.random(m, k, dtype=dtype), session.random(n, k, dtype=dtype) / k**0.5
        term = session.random(n, dtype=dtype) if bias else None
        layout = layout_of(packing.spec, packing.group, n)
        return cls(x, w, term, OPS.quantize(x, ASYMMETRIC), pack(w, (), packing).weight, layout)

    @property
    def scale(self) -> Tensor:
        """The scales, float32 [N], of a weight with one scale per row."""
        return OPS.weight_scale(self.weight, len(self.w))  # type: ignore[no-any-return]

    def in_float(self) -> Tensor:
        return F.linear(self.x, self.w, self.bias)

    def product(self, activation: str = "none") -> Tensor:
        """Multiplies the codes, with the epilogue."""
        return OPS.linear(*self.codes, *self._rest(activation))  # type: ignore[no-any-return]

    def weight_only(self) -> Tensor:
        return OPS.linear_float(self.x, *self._rest("none"))  # type: ignore[no-any-return]

    def dynamic(self, activation: str = "none") -> Tensor:
        """Quantizes x and multiplies, in one operator."""
        weight, layout, bias, *end = self._rest(activation)
        return OPS.linear_dynamic(self.x, weight, layout, bias, ASYMMETRIC, *end)  # type: ignore

    def _rest(self, activation: str) -> tuple[object, ...]:
        return self.weight, self.layout, self.bias, activation, self.x.dtype


def copies(session: Session, make: Callable[[], Linear]) -> list[Linear]:
    """Returns enough linears that the codes of their weights do not stay in the L2 cache."""
    first = make()
    count = -(-session.past_l2 // max(first.w.numel(), 1))
    return [first, *(make() for _ in range(min(count, 64) - 1))]


def calls(linears: list[Linear], method: str, *arguments: object) -> list[Call]:
    return [partial(getattr(linear, method), *arguments) for linear in linears]


def each(*axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields all combinations, with the last axis varying fastest."""
    if not axes:
        yield ()
        return
    first, *others = axes
    for value in first:
        for rest in each(*others):
            yield (value, *rest)
