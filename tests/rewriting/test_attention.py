"""int8_attention: laws of the operator, and its way through the compiler."""

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
from qfx.graph.capture import value
from qfx.match.attention import Attention
from qfx.match.matching import match
from tests.conftest import UseCosts, on_isa, on_threads, same_bits
from tests.lib import bounds
from tests.lib.bounds import Known
from tests.lib.costs import FIXED, exchanged, fixed_tables
from tests.lib.int8_calls import int8_matmuls
from tests.lib.pairs import every
from tests.lib.strategies import ISAS, SEEDS

OPS = torch.ops.qfx
SIZES = st.sampled_from([1, 2, 5, 13, 31, 32, 33, 64, 70])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False):
    return OPS.int8_attention(q, k, v, mask, q.shape[-1] ** -0.5, causal, torch.float32)


def operands(seed: int, m: int, n: int, d: int, e: int, heads: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(rows, heads, columns, generator=generator).transpose(0, 1)
        for rows, columns in ((m, d), (n, d), (n, e))
    )


def bound(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False):
    """How far int8 may be from exact attention, which is scaled by 1 / sqrt(D)."""
    known = [Known(t.double(), torch.zeros(t.shape).double()) for t in (q, k, v)]
    masks = [] if mask is None else [Known(mask, torch.zeros(()))]
    return bounds.Attention(causal).in_codes(bounds.U32, *known, *masks)


@given(ISAS, SIZES, SIZES, SIZES, SIZES, st.booleans(), SEEDS)
def test_within_the_bound_of_exact_attention(
    isa: str, m: int, n: int, d: int, e: int, causal: bool, seed: int
) -> None:
    q, k, v = operands(seed, m, n, d, e)
    with on_isa(isa):
        y = attend(q, k, v, causal=causal).double()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    assert ((y - exact).abs() <= bound(q, k, v, causal=causal)).all()


@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from(["none", "causal", "float", "bool"]), SEEDS)
def test_all_instruction_sets_and_threads_give_the_same_bits(
    m: int, n: int, d: int, e: int, masked: str, seed: int
) -> None:
    q, k, v = operands(seed, m, n, d, e, heads=40)
    mask = {"float": torch.randn(m, n), "bool": torch.rand(1, n) < 0.5}.get(masked)
    found = []
    for isa in _C.isas():
        for threads in (1, 2):
            with on_isa(isa), on_threads(threads):
                found.append(attend(q, k, v, mask, masked == "causal"))
    assert all(same_bits(found[0], other) for other in found)


@given(ISAS, SIZES, SIZES, SEEDS)
def test_what_all_keys_share_does_not_matter(isa: str, m: int, n: int, seed: int) -> None:
    """Keys far from zero, as outlier features make them, cost no accuracy: they are centered."""
    q, k, v = operands(seed, m, n, 32, 16)
    far = k + 64 * torch.randn(1, 1, 32)
    exact = F.scaled_dot_product_attention(q.double(), far.double(), v.double())
    with on_isa(isa):
        error = (attend(q, far, v).double() - exact).abs()
    limit = bound(q, far - far.mean(-2, keepdim=True), v)
    assert (error <= limit + v.abs().amax() * 64 * 32 * 2.0**-20).all()


@given(ISAS, SIZES, SIZES, SEEDS)
def test_a_mask_of_minus_infinity_takes_keys_away(isa: str, m: int, n: int, seed: int) -> None:
    q, k, v = operands(seed, m, n, 16, 8)
    q, k, v = q[0], k[0], v[0]
    kept = torch.arange(n) % 3 != 1
    kept[0] = True
    added = torch.zeros(n).masked_fill(~kept, -math.inf)
    with on_isa(isa):
        y = attend(q, k, v, kept)
        assert same_bits(y, attend(q, k, v, added.expand(m, n)))
    exact = F.scaled_dot_product_attention(*(t[None].double() for t in (q, k, v)), attn_mask=kept)
    assert ((y - exact[0]).abs() <= bound(q[None], k[None], v[None], kept)).all()


def test_a_row_without_keys_is_zero(isa: str) -> None:
    q, k, v = operands(0, 4, 6, 8, 8)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[2] = False
    y = attend(q, k, v, mask)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not y[:, 2].any() and not expected[:, 2].any() and y[:, 1].any()
    assert not attend(q, k[:, :0], v[:, :0]).any()


ERRORS = {
    "shapes": ((torch.randn(2, 5, 8), torch.randn(3, 6, 8), torch.randn(3, 6, 8)), "q has shape"),
    "features": ((torch.randn(5, 8), torch.randn(6, 7), torch.randn(6, 8)), "q has D=8"),
    "keys": ((torch.randn(5, 8), torch.randn(6, 8), torch.randn(4, 8)), "k has N=6 keys"),
    "mask": (
        (torch.randn(5, 8), torch.randn(6, 8), torch.randn(6, 8), torch.zeros(5, 4)),
        "mask has shape 5x4, which does not broadcast",
    ),
    "mask_type": (
        (torch.randn(5, 8), torch.randn(6, 8), torch.randn(6, 8), torch.zeros(5, 6).int()),
        "mask has dtype Int, expected Float or Bool",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_sentence(name: str) -> None:
    arguments, phrase = ERRORS[name]
    with pytest.raises(RuntimeError, match=phrase):
        attend(*arguments)


# --- through the compiler ---


class Block(nn.Module):
    """Self-attention as models write it."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.project, self.causal = nn.Linear(32, 96), causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return y.transpose(1, 2).flatten(2)


@pytest.fixture
def gaining(use_costs: UseCosts) -> None:
    """A cost model that sees a gain in int8 attention."""
    kinds = ("attentions", "attention_steps")
    use_costs(fixed_tables(**{kind: exchanged(FIXED[kind]) for kind in kinds}))


def _sqnr(exact: Tensor, found: Tensor) -> float:
    noise = (exact - found).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))


@pytest.mark.parametrize("keys, inner", every(["all", "masked", "causal"], ["eager", "inductor"]))
def test_attention_of_a_block_is_int8(gaining: None, inner: str, keys: str) -> None:
    torch.manual_seed(0)
    model, x = Block(keys == "causal").eval(), torch.randn(2, 40, 32)
    mask = torch.rand(2, 1, 40, 40) < 0.8 if keys == "masked" else None
    compiled = torch.compile(model, backend="qfx", options={"inner": inner, "minimum_gain": 0})
    with torch.no_grad():
        assert _sqnr(model(x, mask), compiled(x, mask)) > 30
        rows = qfx.explain(model, x, mask, options={"minimum_gain": 0}).rows
    assert [r.scheme != "float" for r in rows] == [True, True]
    assert rows[1].sqnr_db is not None and rows[1].sqnr_db > 30


def _repeated(t: Tensor) -> Tensor:
    """As models without grouped attention write it."""
    b, h, n, d = t.shape
    return t[:, :, None, :, :].expand(b, h, 2, n, d).reshape(b, h * 2, n, d)


def _written(t: Tensor) -> Tensor:
    """The source is another one when attention reads its copy."""
    copy = _repeated(t)
    t.mul_(2)
    return copy


# Heads that share keys, q [3, 4, 40, 16] and k, v with 2 heads: how they meet q, and whether the
# operator reads them as they were.
SHARED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "groups": (lambda t: t, True),
    "one": (lambda t: t[:, :1], True),
    "expanded": (lambda t: t[:, :1].expand(-1, 4, -1, -1), False),
    "repeated": (_repeated, True),
    "interleaved": (lambda t: t.repeat_interleave(2, dim=1), True),
    "unsqueezed": (lambda t: t.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2), True),
    "tiled": (lambda t: t.repeat(1, 2, 1, 1), False),
    "in turn": (lambda t: t.unsqueeze(1).expand(-1, 2, -1, -1, -1).flatten(1, 2), False),
    "selected": (lambda t: t[:, [1, 0], None].expand(-1, -1, 2, -1, -1).flatten(1, 2), False),
    "written": (_written, False),
}


class Shares(nn.Module):
    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.meet, self.gqa = SHARED[spelling][0], spelling == "groups"

    def forward(self, x: Tensor) -> Tensor:
        k, v = (self.meet(t) for t in (x[:, :2] * 0.5, x[:, 2:4] + 1))
        return F.scaled_dot_product_attention(x, k, v, is_causal=True, enable_gqa=self.gqa)


@pytest.mark.parametrize("spelling", SHARED)
def test_heads_that_share_keys_are_int8(gaining: None, spelling: str) -> None:
    """The same bits as of copies, and the operator is given no copies."""
    torch.manual_seed(0)
    model, x = Shares(spelling), torch.randn(3, 4, 40, 16)
    heads: list[int] = []

    def look(gm: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        heads.extend(value(m.key).shape[1] for m in match(gm) if isinstance(m, Attention))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=look)(x)
        torch._dynamo.reset()
        k, v = (model.meet(t) for t in (x[:, :2] * 0.5, x[:, 2:4] + 1))
        compiled = torch.compile(model, backend="qfx", options={"inner": "eager"})
        assert same_bits(compiled(x), attend(x, k, v, causal=True))
        (row,) = qfx.explain(model, x).rows
    assert len(heads) == 1 and (heads[0] < 4) == SHARED[spelling][1]
    assert row.scheme != "float" and row.sqnr_db is not None and row.sqnr_db > 30


def test_attention_that_records_gradients(gaining: None) -> None:
    """Is float, unless gradients are asked for in int8; then they are near those of float."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 40, 32, requires_grad=True)
    (exact,) = torch.autograd.grad(model(x).square().sum(), x)
    for backward in ("float", "int8"):
        torch._dynamo.reset()
        options = {"inner": "eager", "minimum_gain": 0, "backward": backward}
        compiled = torch.compile(model, backend="qfx", options=options)
        (grad,), found = int8_matmuls(
            lambda run: torch.autograd.grad(run(x).square().sum(), x), compiled
        )
        called = [name in found for name in ("qfx::int8_attention", "qfx::int8_attention_backward")]
        assert called == 2 * [backward == "int8"]
        assert torch.cosine_similarity(grad.ravel(), exact.ravel(), 0) > 0.99


def test_attention_that_gains_in_the_forward_pass_alone_stays_float(use_costs: UseCosts) -> None:
    """While gradients are recorded: a step has the backward pass too."""
    use_costs(fixed_tables(attentions=exchanged(FIXED["attentions"])))
    model, x = Block(), torch.randn(2, 40, 32)
    options = {"inner": "eager", "minimum_gain": 0, "backward": "int8"}
    compiled = torch.compile(model, backend="qfx", options=options)
    for recorded in (True, False):
        torch._dynamo.reset()
        with torch.set_grad_enabled(recorded):
            _, found = int8_matmuls(lambda run: run(x), compiled)
        assert ("qfx::int8_attention" in found) == (not recorded)


@pytest.mark.parametrize("times", [1.0, 30.0])
def test_the_report_says_how_near_gradients_are(gaining: None, times: float) -> None:
    """With backward="int8" alone; where scores are far apart, that they are not near."""
    torch.manual_seed(0)
    model, x = Block(causal=True), torch.randn(2, 40, 32) * times
    for backward in ("float", "int8"):
        options = {"minimum_gain": 0, "backward": backward}
        row = qfx.explain(model, x, options=options).rows[1]
        assert (row.gradient_cosine is None) == (backward == "float")
    assert row.gradient_cosine is not None and 0.5 < row.gradient_cosine < 1
    assert ("below 0.995" in row.reason) == (row.gradient_cosine < 0.995) == (times > 1)
    inside = nn.ModuleDict({"block": model})
    inside.forward = lambda x: inside["block"](x)
    report = qfx.explain(inside, x, options=options)
    assert report.far_gradients == (("block",) if times > 1 else ())
    left = qfx.explain(inside, x, options=options | {"skip": [*report.far_gradients]})
    assert (left.rows[1].scheme == "float") == (times > 1)
    assert f"the cosine of its int8 gradients is {row.gradient_cosine:.4f}" in row.reason


def test_a_mask_that_learns_keeps_attention_float(gaining: None) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(40, 40))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=self.bias)

    model, x = Biased(), torch.randn(2, 4, 40, 16)
    options = {"inner": "eager", "minimum_gain": 0, "backward": "int8"}
    (row,) = qfx.explain(model, x, options=options).rows
    assert "the gradient of its mask is recorded" in row.reason
    torch.compile(model, backend="qfx", options=options)(x).sum().backward()
    assert model.bias.grad is not None


def test_without_a_gain_attention_stays_float() -> None:
    model, x = Block().eval(), torch.randn(2, 40, 32)
    with torch.no_grad():
        reason = qfx.explain(model, x, options={"minimum_gain": 0}).rows[1].reason
    assert "an attention: int8 would be 0." in reason
