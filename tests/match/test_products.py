"""Matmuls of two activations: int8 only where the cost model sees a gain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import qfx
from qfx.match.base import Unmatched
from qfx.match.matching import match
from qfx.match.products import Product
from qfx.ops.single_tensors import sqnr
from qfx.plan.policy import decide
from qfx.rewriting.canonical import rewrite
from qfx.rewriting.constants import as_constants
from qfx.rewriting.fusion import fuse
from tests.conftest import UseCosts
from tests.lib.costs import Prices
from tests.lib.models import Block

G = torch.Generator().manual_seed(0)
A, B, C = torch.randn(3, 5, 8, generator=G), torch.randn(3, 7, 8, generator=G), torch.randn(7)
HEADS = torch.randn(2, 5, 3, 8, generator=G), torch.randn(2, 7, 3, 8, generator=G)

CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "matmul": (lambda a, b: a @ b.mT, (A, B)),
    "method": (lambda a, b: a.matmul(b.transpose(1, 2)), (A, B)),
    "bmm": (lambda a, b: torch.bmm(a, b.mT), (A, B)),
    "two_dimensions": (lambda a, b: a[0] @ b[0].t(), (A, B)),
    "four_dimensions": (lambda a, b: a[None] @ b[None].mT, (A, B)),
    "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b.mT), (A, B, C)),
    "baddbmm_scaled": (lambda a, b, c: torch.baddbmm(c, a, b.mT, beta=0.5, alpha=2), (A, B, C)),
    "baddbmm_no_term": (lambda a, b, c: c.baddbmm(a, b.mT, beta=0), (A, B, C)),
    "baddbmm_keywords": (
        lambda a, b, c: c.baddbmm(batch1=a, batch2=b.mT, beta=1.0, alpha=0.5), (A, B, C)),
    "scores": (lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k), HEADS),
    "values": (lambda p, v: torch.einsum("bqhk,bhkd->bqhd", p, v.transpose(1, 2).mT), (
        torch.rand(2, 5, 3, 8, generator=G), torch.randn(2, 7, 3, 8, generator=G))),
    "chain": (lambda a, b: ((a @ b.mT) @ b) @ a.mT, (A, B)),
}  # fmt: skip


def _traced(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    return qfx.trace(fx.symbolic_trace(function), *inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_int8_where_it_gains(name: str) -> None:
    """Canonical and fused give the same bits, near float's."""
    function, inputs = CASES[name]
    results = []
    for stages in ((), (fuse,)):
        gm = _traced(function, inputs)
        plan = decide(match(gm), qfx.Config(scheme="w8a8-asymmetric"), Prices(2.0))
        assert plan.total == plan.quantized == (3 if name == "chain" else 1), plan
        rewrite(gm, plan, as_constants(gm))
        for stage in stages:
            stage(gm)
            assert "int8_bmm_dynamic" in gm.code and "qfx.quantize" not in gm.code
        results.append(gm(*inputs))
    assert torch.equal(*results)
    assert 25 < sqnr(function(*inputs), results[0]) < 70


@pytest.mark.parametrize(("gain", "minimum", "int8"), [(0.9, 0, 0), (1.05, 0, 1), (1.05, 1.1, 0)])
def test_products_have_to_gain(gain: float, minimum: float, int8: int) -> None:
    gm = _traced(*CASES["matmul"])
    plan = decide(match(gm), qfx.Config(minimum_gain=minimum), Prices(gain))
    assert plan.quantized == int8
    assert int8 or f"int8 would be {gain:.2f}x float, below" in plan.entries[0].reason


def test_attention_of_a_block_through_the_backend(use_costs: UseCosts) -> None:
    """Scores and values beside the seven linears, names and times in explain."""
    use_costs(Prices(2.0))
    model, x = Block(), torch.randn(2, 5, 32)
    options = {"scheme": "w8a8-asymmetric", "inner": "eager"}
    with torch.no_grad():
        y = torch.compile(model, backend=qfx.backend, options=options)(x)
        assert 25 < sqnr(model(x), y) < 60
    report = qfx.explain(model, x, options=options)
    assert (report.quantized, report.total) == (9, 9)
    assert all(row.measured and row.sqnr_db > 25 for row in report.rows)
    assert [row.shape for row in report.rows if "*" in row.shape] == ["2*5x32x5", "2*5x5x32"]


REFUSED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "broadcast": (lambda a, b: a @ b[0].t(), (A, B), "different batches"),
    "double": (
        lambda a, b: a @ b.mT,
        (A.double(), B.double()),
        "the left operand is float64; int8 serves",
    ),
    "vector": (lambda a, c: a @ c, (A, torch.randn(8)), "one of them a vector"),
    "broadcast_sum": (
        lambda a, b: torch.einsum("bmk,bnk->bmn", a[..., :1], b),
        (A, B),
        "may broadcast the axis",
    ),
    "no_batched_matmul": (lambda a: torch.einsum("bij,bij->bi", a, a), (A,), "no batched matmul"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    function, inputs, reason = REFUSED[name]
    (found,) = match(_traced(function, inputs))
    assert isinstance(found, Unmatched) and reason in found.reason, found


class Batched(nn.Module):
    """A parameter that has a matrix for each batch."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.run = nn.Parameter(B.clone()), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight)


BATCHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w.mT,
    "bmm": lambda x, w: torch.bmm(w, x.mT),
    "left": lambda x, w: torch.matmul(w, x.mT),
    "einsum": lambda x, w: torch.einsum("ebk,enk->ebn", x, w),
    "einsum, weight first": lambda x, w: torch.einsum("enk,ebk->ebn", w, x),
}


@pytest.mark.parametrize("name", BATCHED)
def test_parameters_with_a_matrix_for_each_batch_are_products(name: str) -> None:
    model = Batched(BATCHED[name]).eval()
    gm = qfx.trace(model, A)
    plan = decide(match(gm), qfx.Config(scheme="w8a8-asymmetric"), Prices(2.0))
    assert plan.quantized == plan.total == 1, plan
    rewrite(gm, plan, as_constants(gm))
    with torch.no_grad():
        assert 25 < sqnr(model(A), gm(A)) < 70


def test_gradients_keep_products_float() -> None:
    found: list[Any] = []

    def look(gm: fx.GraphModule, inputs: Any) -> Any:
        found.extend(match(gm))
        return gm.forward

    torch.compile(lambda a, b: a @ b.mT, backend=look)(A.clone().requires_grad_(), B)
    assert isinstance(found[0], Unmatched) and "gradient" in found[0].reason


def test_unknown_shapes_keep_products_float() -> None:
    (found,) = match(fx.symbolic_trace(lambda a, b: a @ b))
    assert isinstance(found, Unmatched | Product) and not isinstance(found, Product)
