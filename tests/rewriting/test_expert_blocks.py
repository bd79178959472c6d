"""Blocks of experts in rewritten graphs: which become one call, and why others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import qfx
from qfx.ops.forms import BLOCK, EXPERTS
from tests.conftest import same_bits
from tests.lib.experts_blocks import BY_MODEL, E, H, J, block_of, routed

ALL = {"minimum_gain": 0}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield


def rewritten(block: nn.Module, *given: Tensor) -> tuple[fx.GraphModule, Any, Any]:
    """Returns the graph that Dynamo captures of a block after rewriting, its plan, and its
    result."""
    kept: list[Any] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        kept.extend(qfx.rewrite(gm, qfx.Config(minimum_gain=0)))
        return kept[0].forward

    with torch.no_grad():
        y = torch.compile(block, backend=backend, fullgraph=True)(*given)
    return kept[0], kept[1], y


def count(gm: fx.GraphModule, call: Any) -> int:
    return [node.target for node in gm.graph.nodes].count(call.operator)


@pytest.mark.parametrize("sizes", ["fixed", "open"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@BY_MODEL
def test_blocks_of_transformers_are_one_call(name: str, dtype: torch.dtype, sizes: str) -> None:
    block, given = block_of(name).to(dtype), routed(dtype)
    block.config._experts_implementation = "grouped_mm"
    if sizes == "open":
        for each in given:
            torch._dynamo.mark_dynamic(each, 0)
    gm, plan, y = rewritten(block, *given)
    assert (count(gm, BLOCK), count(gm, EXPERTS)) == (1, 0), plan
    assert "2 of 2 matmuls in int8" in str(plan)
    assert not [n for n in gm.graph.nodes if n.target in (torch.sort, "add_", "chunk")]
    with torch.no_grad():
        assert same_bits(y, qfx.nn.Experts.from_float(block, "w8a8")(*given))


def test_a_compiled_block_has_the_bits_of_the_module() -> None:
    block, given = block_of("gpt-oss"), routed()
    block.config._experts_implementation = "grouped_mm"
    compiled = torch.compile(block, backend="qfx", options=ALL, fullgraph=True)
    with torch.no_grad():
        assert same_bits(compiled(*given), qfx.nn.Experts.from_float(block, "w8a8")(*given))


def fallback(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    y: Tensor = torch.ops.transformers.grouped_mm_fallback(x, w, offsets)
    return y


def _silu(u: Tensor) -> Tensor:
    g, v = u.chunk(2, -1)
    return F.silu(g) * v


class Block(nn.Module):
    """A block of experts that a user writes, with parts that can be replaced."""

    def __init__(self, **parts: Callable[..., Any]) -> None:
        super().__init__()
        block = block_of("olmoe")
        self.up, self.down = block.gate_up_proj, block.down_proj
        self.parts = parts

    def part(self, name: str, otherwise: Callable[..., Any], *given: Any) -> Any:
        return self.parts.get(name, otherwise)(*given)

    def forward(self, x: Tensor, index: Tensor, routing: Tensor) -> Any:
        slots = index.shape[1]
        numbers, order = torch.sort(self.part("flat", lambda t: t.flatten(), index))
        ends = torch.cumsum(torch.histc(numbers.float(), E, 0, E - 1), 0, dtype=torch.int32)
        u = fallback(x[self.part("token", lambda o, s: o // s, order, slots)], self.up.mT, ends)
        h = self.part("gate", _silu, u)
        y = fallback(h, self.down.mT, self.part("ends", lambda e: e, ends))
        self.part("between", lambda x: None, x)
        y = y * self.part("weight", lambda r, o: r.flatten()[o][:, None], routing, order)
        y = y[self.part("back", torch.argsort, order)]
        y = self.part("view", lambda y, s: y.reshape(-1, s, H), y, slots)
        return self.part("sum", lambda y, u: y.sum(1), y, u)


def test_a_block_of_a_user_is_one_call() -> None:
    gm, plan, _ = rewritten(Block(), *routed())
    assert count(gm, BLOCK) == 1, plan


def _written(x: Tensor) -> None:
    x.mul_(2)


# what is not the block of (X2) -> a word of the reason
APART: dict[str, tuple[dict[str, Callable[..., Any]], str]] = {
    "another gate": ({"gate": lambda u: u[:, :J].sin() * u[:, J:]}, "no such gate"),
    "a gate of several": ({"gate": lambda u: _silu(u) * u.square().mean()}, "no such gate"),
    "a wider gate": ({"gate": lambda u: torch.cat([_silu(u)[:, :48]] * 2, 1)}, "no such gate"),
    "its first outputs": ({"sum": lambda y, u: (y.sum(1), u)}, "which is inside of it"),
    "every slot": ({"sum": lambda y, u: y}, "is not read by one sum"),
    "a sum of tokens": ({"sum": lambda y, u: y.sum(0)}, "no sum over slots"),
    "a mean": ({"sum": lambda y, u: y.mean(1)}, "is not read by one sum"),
    "other tokens": ({"token": lambda o, s: o % (24 // s)}, "is no floordiv"),
    "the tokens of other slots": ({"token": lambda o, s: o // 3}, "not the tokens"),
    "transposed slots": ({"flat": lambda t: t.T.reshape(-1)}, "not the tokens"),
    "halves of outputs": ({"view": lambda y, s: y.reshape(-1, s, H // 2)}, "is not [T, slots, N]"),
    "another order": ({"back": lambda o: o}, "sorted back"),
    "weights by expert": ({"weight": lambda r, o: r.flatten()[:, None]}, "getitem"),
    "x that is written": ({"between": _written}, "may write to what it reads"),
    "offsets of others": ({"ends": lambda e: e.clone()}, "its rows have 1 products"),
}  # fmt: skip


@pytest.mark.parametrize("case", APART)
def test_other_blocks_stay_two_products(case: str) -> None:
    parts, why = APART[case]
    given = routed()
    gm, plan, y = rewritten(Block(**parts), given[0].clone(), *given[1:])
    assert (count(gm, BLOCK), count(gm, EXPERTS)) == (0, 2)
    assert f"no {BLOCK.name}: " in str(plan) and why in str(plan), plan
    with torch.no_grad():
        expected = Block(**parts)(given[0].clone(), *given[1:])
    for found, exact in zip(_tensors(y), _tensors(expected), strict=True):
        assert (found - exact).norm() < 0.03 * exact.norm()


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
