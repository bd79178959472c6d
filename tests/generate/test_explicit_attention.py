"""Attention that models write out: read as one call where it is one, and left alone elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from qfx.generate.explicit_attention import read_codes
from qfx.ops.kv_cache import kv_empty
from qfx.programs import build
from tests.lib import bounds

ops = torch.ops.qfx
B, H, T, D, L = 2, 3, 4, 16, 48
NEVER = torch.finfo(torch.float32).min
SLOPES = torch.tensor([0.5, 0.25, 0.125])
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(D)


def slopes(flat: bool = False) -> Tensor:
    found = SLOPES[:, None, None] * torch.arange(L)
    return found.repeat(B, 1, 1) if flat else found


def _flat(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """As BLOOM has it."""
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    s = slopes(flat=True).baddbmm(q, k.transpose(-1, -2), beta=1.0, alpha=0.25).view(B, H, T, L)
    s = s.masked_fill(~seen, NEVER)
    return torch.bmm(s.softmax(-1).view(B * H, T, L), v).view(B, H, T, D)


def _divided_last(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """As CodeGen has it."""
    hidden = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    return ((q @ k.mT + hidden) / 4.0).softmax(-1) @ v


def _weights_too(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    return p @ v + p.sum()


def _permuted_values(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~seen, NEVER).softmax(-1) @ v.flip(2)


WRITTEN: dict[str, Attend] = {
    "plain": lambda q, k, v, seen: scores(q, k).masked_fill(~seen, NEVER).softmax(-1) @ v,
    "where": lambda q, k, v, seen: torch.where(seen, scores(q, k), NEVER).softmax(-1) @ v,
    "slopes": lambda q, k, v, seen: (
        (scores(q, k) + slopes()).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    ),
    "flat": _flat,
    "divided last": _divided_last,
    "no mask": lambda q, k, v, seen: scores(q, k).softmax(-1) @ v,
    "bounded": lambda q, k, v, seen: (
        scores(q, k).masked_fill(~seen, -torch.inf).clamp(min=NEVER).softmax(-1) @ v
    ),
}
OTHERS: dict[str, Attend] = {
    "a mask of small numbers": lambda q, k, v, seen: (
        scores(q, k).masked_fill(~seen, -10.0).softmax(-1) @ v
    ),
    "what is seen is hidden": lambda q, k, v, seen: (
        scores(q, k).masked_fill(seen, NEVER).softmax(-1) @ v
    ),
    "a table of its own": lambda q, k, v, seen: (
        torch.where(torch.ones(T, L).tril().bool(), scores(q, k), NEVER).softmax(-1) @ v
    ),
    "negative scores": lambda q, k, v, seen: (-scores(q, k) * 1.0).softmax(-1) @ v,
    "a negative factor": lambda q, k, v, seen: (scores(q, k) * -1.0).softmax(-1) @ v,
    "a bound that counts": lambda q, k, v, seen: scores(q, k).clamp(min=-1.0).softmax(-1) @ v,
    "softmax over queries": lambda q, k, v, seen: scores(q, k).softmax(-2) @ v,
    "two masks": lambda q, k, v, seen: (
        scores(q, k).masked_fill(~seen, NEVER).masked_fill(seen, NEVER).softmax(-1) @ v
    ),
    "keys for values": lambda q, k, v, seen: scores(q, k).softmax(-1) @ k,
    "other values": _permuted_values,
    "weights that are changed": lambda q, k, v, seen: (scores(q, k).softmax(-1) * 2) @ v,
    "weights that are given": _weights_too,
}


class _Step(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, seen: Tensor, *cache: Tensor) -> Tensor:
        k = ops.kv_keys(*cache[:2], L, torch.float32)
        v = ops.kv_values(*cache[2:], L, torch.float32)
        return self.attend(q, k, v, seen)


def made(attend: Attend) -> tuple[fx.GraphModule, tuple[Tensor, ...], Tensor]:
    """The graph, its inputs and what it gives before it is rewritten."""
    torch.manual_seed(0)
    cache = kv_empty(B, H, L, D)
    k, v, q = torch.randn(3, B, H, L, D).unbind()
    ops.kv_write(*cache, k, v, torch.arange(L))
    seen = torch.rand(B, 1, T, L) < 0.5
    seen[..., 0] = True
    inputs = (q[:, :, :T].contiguous(), seen, *cache)
    with torch.no_grad():
        gm: Any = torch.export.export(_Step(attend), inputs).module()
        expected = gm(*inputs)
        read_codes(gm)
    return gm, inputs, expected


class _Calls(fx.Interpreter):
    """Runs a graph, and keeps the arguments and the result of each attention to the cache."""

    def __init__(self, gm: fx.GraphModule, inputs: tuple[Tensor, ...]) -> None:
        super().__init__(gm)
        self.found: list[tuple[tuple[Any, ...], Tensor]] = []
        with torch.no_grad():
            self.y = self.run(*inputs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        y = super().call_function(target, args, kwargs)
        if target is ops.kv_attention.default:
            self.found.append((args, y))
        return y


def limit(args: tuple[Any, ...]) -> Tensor:
    """Bounds what differs from attention in float: either is within (K6) of the exact one."""
    return 2 * bounds.kv_attention(*args)


def reads_floats(gm: fx.GraphModule) -> bool:
    return any(n.target in (ops.kv_keys.default, ops.kv_values.default) for n in gm.graph.nodes)


@pytest.mark.parametrize("name", WRITTEN)
def test_one_call_and_one_program_give_what_was_written_out(name: str) -> None:
    gm, inputs, expected = made(WRITTEN[name])
    assert not reads_floats(gm)
    runner = build(gm, inputs)
    assert not runner.outside
    calls = _Calls(gm, inputs)
    ((args, _),) = calls.found
    for y in (calls.y, runner(*inputs)[0]):
        assert ((y - expected).abs() <= limit(args)).all()


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_attention_stays(name: str) -> None:
    gm, inputs, expected = made(OTHERS[name])
    assert reads_floats(gm)
    assert torch.equal(gm(*inputs), expected)


def test_layers_share_what_is_added_to_their_scores() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, added: Tensor, hidden: Tensor) -> Tensor:
        return (scores(q, k) + added).masked_fill(hidden, NEVER).softmax(-1) @ v

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        added = slopes()
        hidden = ~seen
        for _ in range(3):
            q = layer(q, k, v, added, hidden)
        return q

    gm, inputs, _ = made(attend)
    targets = [n.target for n in gm.graph.nodes]
    assert targets.count(ops.kv_attention.default) == 3
    assert targets.count(torch.ops.aten.add.Tensor) == 1
    _, seen, *cache = inputs
    k, v = (op(*part, L, torch.float32) for op, part in zip(
        (ops.kv_keys, ops.kv_values), (cache[:2], cache[2:]), strict=True
    ))  # fmt: skip
    for args, y in _Calls(gm, inputs).found:
        assert ((y - layer(args[0], k, v, slopes(), ~seen)).abs() <= limit(args)).all()
