"""attention_decode, attention_append: laws of the operators, and their way through the compiler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import qfx
from qfx import _C
from qfx.ops.attention_decode import attention_decode
from tests.conftest import UseCosts, on_isa, on_threads, same_bits
from tests.lib import bounds
from tests.lib.costs import FIXED, exchanged, fixed_tables
from tests.lib.strategies import ISAS, SEEDS

OPS = torch.ops.qfx
SIZES = st.sampled_from([1, 2, 5, 13, 16, 31, 32, 33, 64, 70, 129])
MASKS = st.sampled_from(["none", "causal", "float", "bool"])


def operands(seed: int, m: int, n: int, d: int, e: int, heads: int = 2) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(heads, r, c, generator=g) for r, c in ((m, d), (n, d), (n, e)))


def rest_of(masked: str, m: int, n: int, d: int) -> tuple[Any, ...]:
    mask = {"float": torch.randn(m, n), "bool": torch.rand(1, n) < 0.5}.get(masked)
    return (mask, d**-0.5, masked == "causal", torch.float32)


@given(ISAS, st.sampled_from([1, 3]), SIZES, SIZES, SIZES, MASKS, SEEDS)
def test_within_the_bound_of_exact_attention(
    isa: str, m: int, n: int, d: int, e: int, masked: str, seed: int
) -> None:
    arguments = (*operands(seed, m, n, d, e), *rest_of(masked, m, n, d))
    with on_isa(isa):
        y = OPS.attention_decode(*arguments).double()
    assert ((y - attention_decode(*arguments)).abs() <= bounds.attention_decode(*arguments)).all()


@given(st.sampled_from([1, 3]), SIZES, SIZES, SIZES, MASKS, SEEDS)
def test_all_instruction_sets_and_threads_give_the_same_bits(
    m: int, n: int, d: int, e: int, masked: str, seed: int
) -> None:
    arguments = (*operands(seed, m, n, d, e, heads=40), *rest_of(masked, m, n, d))
    found = []
    for isa in _C.isas():
        for threads in (1, 2):
            with on_isa(isa), on_threads(threads):
                found.append(OPS.attention_decode(*arguments))
    assert all(same_bits(found[0], other) for other in found)


@given(SIZES, SIZES, st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), SEEDS)
def test_appending_is_cat_and_attention(
    past: int, added: int, dtype: torch.dtype, apart: bool, seed: int
) -> None:
    q, k, v = (t.to(dtype) for t in operands(seed, 1, past + added, 24, 40))
    if apart:
        k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (k, v))
    parts = [part for t in (k, v) for part in (t[:, :past], t[:, past:])]
    got = OPS.attention_append(q, *parts, None, 0.2, False, dtype)
    expected = (OPS.attention_decode(q, k, v, None, 0.2, False, dtype), k, v)
    assert all(same_bits(g, e) for g, e in zip(got, expected, strict=True))


def test_rows_without_keys_are_zero_and_faults_show(isa: str) -> None:
    q, k, v = operands(0, 2, 40, 24, 40)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1] = False
    v[0, 3, 7] = math.inf
    y = OPS.attention_decode(q, k, v, mask, 1.0, False, torch.float32)
    assert not y[:, 1].any() and y[:, 0].all()
    k[1, 39, 5] = math.nan
    y = OPS.attention_decode(q, k, v, None, 1.0, False, torch.float32)
    assert y[1].isnan().all() and not y[0].isnan().any() and y[0, :, 7].isinf().all()
    none = OPS.attention_decode(q, k[:, :0], v[:, :0], None, 1.0, False, torch.float32)
    assert not none.any()


def test_error_sentence() -> None:
    q, k, v = operands(0, 1, 4, 8, 8)
    phrase = "past_k is Float with shape 2x4x8 and k Float with shape 2x1x7, expected one dtype"
    with pytest.raises(RuntimeError, match=f"attention_append: {phrase}"):
        OPS.attention_append(q, k, k[:, :1, :7], v, v, None, 1.0, False, torch.float32)


# --- through the compiler ---


class Step(nn.Module):
    """One token's attention behind a cache; `between` sees the longer keys before the attention,
    which reads what `meet` makes of keys and values."""

    def __init__(
        self,
        between: Callable[[Tensor], Any] = lambda keys: None,
        meet: Callable[[Tensor], Tensor] = lambda t: t,
    ) -> None:
        super().__init__()
        self.project, self.between, self.meet = nn.Linear(32, 96), between, meet

    def forward(self, x: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        k, v = (t[:, : past_k.shape[1]] for t in (k, v))
        keys, values = torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=2)
        seen = self.between(keys)
        y = F.scaled_dot_product_attention(q, self.meet(keys), self.meet(values))
        y = y.transpose(1, 2).flatten(2)
        return y, keys, values, keys if seen is None else seen


def inputs(tokens: int = 1, heads: int = 4) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (torch.randn(2, tokens, 32), *(torch.randn(2, heads, 20, 8) for _ in range(2)))


@pytest.fixture
def gaining(use_costs: UseCosts) -> None:
    """A cost model that sees a gain in `attention_decode`."""
    use_costs(fixed_tables(decodes=exchanged(FIXED["decodes"])))


def operators(model: nn.Module, *arguments: Tensor) -> tuple[Any, list[str]]:
    """The result, and which attentions ran."""
    compiled = torch.compile(model, backend="qfx", options={"inner": "eager", "minimum_gain": 0})
    with torch.no_grad(), torch.autograd.profiler.profile(use_kineto=False) as trace:
        result = compiled(*arguments)
    ran = [e.key for e in trace.key_averages()]
    return result, [name for name in ran if "attention" in name and "aten" not in name]


BETWEEN: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "nothing": (lambda keys: None, "append"),
    "read": (lambda keys: keys * 2, "decode"),
    "written": (lambda keys: keys.mul_(2), "decode"),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_attention_of_a_step(gaining: None, name: str) -> None:
    between, operator = BETWEEN[name]
    model, arguments = Step(between).eval(), inputs()
    got, ran = operators(model, *arguments)
    assert ran == [f"qfx::attention_{operator}"]
    with torch.no_grad():
        expected = model(*arguments)
    for g, e in zip(got, expected, strict=True):
        noise = (g - e).square().sum()
        assert g.shape == e.shape and 10 * torch.log10(e.square().sum() / noise) > 30


def test_heads_that_share_a_cache(gaining: None) -> None:
    """The cache is longer by one key, and is not copied for each head of queries."""
    repeat = lambda t: t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)  # noqa: E731
    model, arguments = Step(meet=repeat).eval(), inputs(heads=2)
    got, ran = operators(model, *arguments)
    assert ran == ["qfx::attention_append"]
    with torch.no_grad():
        expected = model(*arguments)
    for g, e in zip(got, expected, strict=True):
        noise = (g - e).square().sum()
        assert g.shape == e.shape and 10 * torch.log10(e.square().sum() / noise) > 30


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_the_cache_grows_from_step_to_step(gaining: None, inner: str) -> None:
    model, (x, *past) = Step().eval(), inputs()
    compiled = torch.compile(model, backend="qfx", options={"inner": inner, "minimum_gain": 0})
    expected = got = (x, *past)
    with torch.no_grad():
        for _ in range(3):
            expected, got = model(x, *expected[1:3]), compiled(x, *got[1:3])
    assert got[1].shape == (2, 4, 23, 8)
    assert (got[0] - expected[0]).abs().max() < 0.1


def test_without_a_gain_or_with_more_queries_it_stays_with_pytorch(gaining: None) -> None:
    assert operators(Step().eval(), *inputs(tokens=2))[1] == []


def test_it_is_told(gaining: None) -> None:
    row = qfx.explain(Step().eval(), *inputs(), options={"minimum_gain": 0}).rows[1]
    assert row.scheme == "float" and "attention_decode predicted" in row.reason


def test_the_printed_graph(gaining: None) -> None:
    printed: list[str] = []

    def look(gm: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        rewritten, _ = qfx.rewrite(gm, qfx.Config(minimum_gain=0))
        printed.append(rewritten.code)
        return gm.forward

    with torch.no_grad():
        torch.compile(Step().eval(), backend=look)(*inputs())
    assert "torch.ops.qfx.attention_append.default(" in printed[0] and "cat" not in printed[0]
