"""Modules of the fuzz programs: how a program reaches them, and what users put on a linear.

What a call means is written in operations of the grammar, so that a bound comes with it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.fuzz.grammar import Op
from tests.lib import bounds
from tests.lib.bounds import TINY, U32, Known


class Broken(nn.Module):
    """A graph break before its linear: what is compiled for one serves all that are like it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.inner(x)


class Held(NamedTuple):
    """How a program calls a module, what holds it, and its path there."""

    call: str = "self.{m}({x})"
    holder: Callable[[nn.Module], nn.Module] = lambda inner: inner
    path: str = ""


BREAKS = "behind_a_break"
HELD = {
    "attribute": Held(),
    "getattr": Held('getattr(self, "{m}")({x})'),
    "in_a_sequential": Held(holder=lambda inner: nn.Sequential(nn.Identity(), inner), path="1"),
    "in_a_list": Held("self.{m}[-1]({x})", lambda inner: nn.ModuleList([inner]), "0"),
    "in_a_dict": Held(
        'self.{m}["it\'s"]({x})', lambda inner: nn.ModuleDict({"it's": inner}), "it's"
    ),
    BREAKS: Held(holder=Broken, path="inner"),
}


@dataclass(frozen=True)
class Holding:
    """A module of a program. `tensors`: its part of the state, with their paths in it."""

    name: str
    held: str
    what: str
    put_on: str | None  # of a linear, a row of PUT_ON
    make: Callable[[], nn.Module]
    tensors: dict[str, str]

    @property
    def paths(self) -> dict[str, str]:
        """The tensors' paths in the program's module."""
        path = ".".join(filter(None, (self.name, HELD[self.held].path)))
        return {name: f"{path}.{inside}" for name, inside in self.tensors.items()}

    def build(self, state: dict[str, tuple[str, Tensor]]) -> nn.Module:
        inner = self.make()
        with torch.no_grad():
            for name, path in self.tensors.items():
                found(inner, path).copy_(state[name][1])
        return HELD[self.held].holder(inner)

    def __str__(self) -> str:
        return f"{self.name}: {self.what}, {self.put_on}, {self.held}"


def found(module: Any, path: str) -> Any:
    """What a dotted path leads to."""
    return functools.reduce(getattr, path.split("."), module)


# --- what users put on a linear ---


class PutOn(NamedTuple):
    """Operations before and after the linear, or one that makes its weight of other tensors;
    `parts`: the paths of the weight, or of these."""

    apply: Callable[[Any], Any] = lambda linear: None
    before: str = ""
    after: str = ""
    weight: Op | None = None
    parts: tuple[str, ...] = ("weight",)

    @property
    def fate(self) -> str:
        """What `qfx.quantize_` does with it: it is `replaced`, `left` float, or `refused`."""
        if self.apply in (_own_forward, _old_weight_norm):
            return "refused"
        return "left" if self.weight else "replaced"


def _pre_hook(linear: nn.Module) -> None:
    linear.register_forward_pre_hook(lambda module, args: (args[0] * 0.75,))


def _hook(linear: nn.Module) -> None:
    linear.register_forward_hook(lambda module, args, y: F.relu(y))


def _own_forward(linear: Any) -> None:
    linear.forward = lambda x: F.linear(x, linear.weight, linear.bias) * 0.75


def _old_weight_norm(linear: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(linear)


def lengths(v: Tensor) -> Tensor:
    """Of the rows of v [N, K], [N, 1]."""
    return v.norm(2, 1, keepdim=True)


def _weight_norm(u: float, g: Known, v: Known) -> Tensor:
    """g v / |v|: K squares, their sum, a root, and a quotient and product of the result's type."""
    w = (g.v * v.v / lengths(v.v)).abs()
    return w * ((v.v.shape[1] + 8) * U32 + 4 * u) + TINY[u]


def _spectral_norm(u: float, w: Known, left: Known, right: Known) -> Tensor:
    """w / (left . w right): sums of K and N products below and one quotient."""
    sigma, terms = left.v @ (w.v @ right.v), left.v.abs() @ (w.v.abs() @ right.v.abs())
    lost = terms * ((sum(w.v.shape) + 8) * U32 + 4 * u) / sigma.abs()
    assert lost < 0.5, "the power iteration has not converged"
    return (w.v / sigma).abs() * (2 * lost + 2 * u) + TINY[u]


def part(text: str, bound: bounds.Rule, writes: bool = False) -> Op:
    """An operation that is not drawn by itself."""
    return Op(text, lambda d: None, bound, writes)


WEIGHT_NORM = part("{out} = {g} * {v} / {v}.norm(2, 1, keepdim=True)", _weight_norm)
SPECTRAL_NORM = part("{out} = {w} / torch.dot({left}, torch.mv({w}, {right}))", _spectral_norm)
_PARAMETRIZED = "parametrizations.weight."
PUT_ON = {
    "nothing": PutOn(),
    "pre_hook": PutOn(_pre_hook, before="scale"),
    "hook": PutOn(_hook, after="relu"),
    "hooks": PutOn(lambda m: (_pre_hook(m), _hook(m)), before="scale", after="relu"),
    "own_forward": PutOn(_own_forward, after="scale"),
    "weight_norm": PutOn(
        parametrizations.weight_norm, weight=WEIGHT_NORM,
        parts=(f"{_PARAMETRIZED}original0", f"{_PARAMETRIZED}original1"),
    ),
    "old_weight_norm": PutOn(_old_weight_norm, weight=WEIGHT_NORM, parts=("weight_g", "weight_v")),
    "spectral_norm": PutOn(
        parametrizations.spectral_norm, weight=SPECTRAL_NORM,
        parts=(f"{_PARAMETRIZED}original", f"{_PARAMETRIZED}0._u", f"{_PARAMETRIZED}0._v"),
    ),
}  # fmt: skip
