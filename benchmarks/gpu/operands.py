"""Operands of linears: random, and as many copies of the weights as no cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.clock import Call
from benchmarks.gpu.session import Session
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec
from qfx.weights.cache import Packed, pack

OPS = torch.ops.qfx
GROUPS = Packing(QSpec(bits=4, group=64))
ROWS = Packing(QSpec())


@dataclass(frozen=True)
class Linear:
    """x [m, k] @ w [n, k].T: float, and the codes of both."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    codes: tuple[Tensor, Tensor, Tensor]
    packed: Packed

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
        return cls(x, w, term, OPS.quantize(x, [1], 8, False), pack(w, (), packing))

    def in_float(self) -> Tensor:
        return F.linear(self.x, self.w, self.bias)

    def product(self, activation: str = "none") -> Tensor:
        """The codes' product, with its epilogue."""
        rest = (self.bias, activation, self.x.dtype)
        return OPS.int8_linear(*self.codes, self.packed.blocks, self.packed.scale, *rest)

    def groups(self) -> Tensor:
        rest = (self.packed.scale, self.packed.zero_point, None, "none", self.x.dtype)
        return OPS.int8_linear_groups(*self.codes, self.packed.blocks, *rest)

    def weight_only(self) -> Tensor:
        rest = (self.packed.scale, self.bias, "none", self.x.dtype)
        return OPS.int8_weight_linear(self.x, self.packed.blocks, *rest)

    def dynamic(self, activation: str = "none") -> Tensor:
        """With the quantization of x, in an operator of its own."""
        how = (self.bias, [1], 8, False, activation, self.x.dtype)
        return OPS.int8_linear_dynamic(self.x, self.packed.blocks, self.packed.scale, *how)


def copies(session: Session, make: Callable[[], Linear]) -> list[Linear]:
    """Enough of them that the codes of their weights do not stay in the L2 cache."""
    first = make()
    count = -(-session.past_l2 // max(first.w.numel(), 1))
    return [first, *(make() for _ in range(min(count, 64) - 1))]


def calls(linears: list[Linear], method: str, *arguments: object) -> list[Call]:
    return [partial(getattr(linear, method), *arguments) for linear in linears]


def each(*axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All combinations, the last axis the fastest."""
    if not axes:
        yield ()
        return
    first, *others = axes
    for value in first:
        for rest in each(*others):
            yield (value, *rest)
