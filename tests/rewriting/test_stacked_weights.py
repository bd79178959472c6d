"""Stacks of weights as models write them: batched matmuls and einsums, all at once and by
number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn

import qfx
from qfx.ops.forms import EXPERTS
from tests.conftest import same_bits
from tests.lib.experts_blocks import block_of, routed

E, M, N, K = 5, 6, 48, 64
IDS = torch.tensor([3, 0, 0, 4, -1, 3, 1])
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Way(NamedTuple):
    """A way to write a product. `x`, `w`: the shapes of its operands. `call`: of x, the stack and
    numbers. `same`: einsum's letters for it, of x and the weights that are chosen."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    call: Call
    same: str
    chosen: bool = False


S = len(IDS)
WAYS = {
    "bmm": Way((E, M, K), (E, K, N), lambda x, w, i: torch.bmm(x, w), "emk,ekn->emn"),
    "transposed": Way((E, M, K), (E, N, K), lambda x, w, i: x @ w.mT, "emk,enk->emn"),
    "left": Way((E, K, M), (E, N, K), lambda x, w, i: w @ x, "ekm,enk->enm"),
    "batches": Way((2, E, M, K), (E, K, N), lambda x, w, i: x @ w, "bemk,ekn->bemn"),
    "one row": Way((E, 1, K), (E, K, N), lambda x, w, i: x.bmm(w), "emk,ekn->emn"),
    "capacity": Way(
        (2, E, M, K), (E, K, N), lambda x, w, i: torch.einsum("becd,edf->becf", x, w),
        "bemk,ekn->bemn",
    ),
    "heads": Way(
        (M, E, K), (E, N, K), lambda x, w, i: torch.einsum("mek,enk->mne", x, w), "mek,enk->mne"
    ),
    "one of each": Way(
        (E, K), (E, K, N), lambda x, w, i: torch.einsum("ek,ekn->en", x, w), "ek,ekn->en"
    ),
    "chosen": Way(
        (S, K), (E, N, K), lambda x, w, i: torch.bmm(w[i], x[..., None])[..., 0], "ek,enk->en",
        True,
    ),
    "chosen, transposed": Way(
        (S, K), (E, K, N), lambda x, w, i: torch.bmm(x[:, None], w[i]).squeeze(1), "ek,ekn->en",
        True,
    ),
    "chosen, then transposed": Way(
        (S, 1, K), (E, N, K), lambda x, w, i: x @ w[i].transpose(1, 2), "emk,enk->emn", True
    ),
    "chosen by einsum": Way(
        (S, K), (E, N, K), lambda x, w, i: torch.einsum("sk,snk->sn", x, w[i]), "ek,enk->en", True
    ),
}  # fmt: skip


class Stacked(nn.Module):
    def __init__(self, way: Way, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.way = way
        g = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter((torch.randn(way.w, generator=g) / K**0.5).to(dtype))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.way.call(x, self.weight, ids)


def one_by_one(model: Stacked, scheme: str, x: Tensor, ids: Tensor) -> Tensor:
    """Computes the product by an int8 linear for each matrix of the stack."""
    way, (left, right, out) = model.way, model.way.same.replace("->", ",").split(",")
    rows = [a for a in left if a in out and a != "e"]
    w = torch.einsum(f"{right}->enk", model.weight.detach())
    given = torch.einsum(f"{left}->e{''.join(rows)}k", x)
    made = []
    for place, e in enumerate(ids.tolist() if way.chosen else range(E)):
        linear = nn.Linear(K, N, bias=False, dtype=w.dtype)
        linear.weight = nn.Parameter(w[e].contiguous())
        int8 = qfx.nn.Linear.from_float(linear, qfx.Config(scheme=scheme).chosen)
        made.append(int8(given[place]))
    return torch.einsum(f"e{''.join(rows)}n->{out}", torch.stack(made))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
@pytest.mark.parametrize("name", WAYS)
def test_it_has_the_bits_of_linears(name: str, scheme: str) -> None:
    """Rewritten, and compiled with fixed and open sizes: as int8 linears of the same weights."""
    model = Stacked(WAYS[name]).eval()
    x = torch.randn(WAYS[name].x, generator=torch.Generator().manual_seed(1))
    config = qfx.Config(scheme=scheme, minimum_gain=0)
    with torch.no_grad():
        expected = one_by_one(model, scheme, x, IDS)
        gm, plan = qfx.rewrite(qfx.trace(model, x, IDS), config)
        assert [n.target for n in gm.graph.nodes].count(EXPERTS.operator) == 1, plan
        assert same_bits(gm(x, IDS), expected)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="qfx", options=config, fullgraph=True)
        assert same_bits(compiled(x, IDS), expected)


@pytest.mark.parametrize("name", ["bmm", "heads", "chosen"])
def test_sizes_may_stay_open(name: str) -> None:
    way, kept = WAYS[name], []
    model = Stacked(way).eval()
    axis = 0 if way.chosen else way.same.index("m")

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        kept.append(qfx.rewrite(gm, qfx.Config(minimum_gain=0)))
        return kept[0][0].forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for size in (4, 7, 3):
        shape = [size if dim == axis else n for dim, n in enumerate(way.x)]
        x, ids = torch.randn(shape), IDS[:size] if way.chosen else IDS
        torch._dynamo.mark_dynamic(x, axis)
        if way.chosen:
            torch._dynamo.mark_dynamic(ids, 0)
        with torch.no_grad():
            assert same_bits(compiled(x, ids), one_by_one(model, "w8a8", x, ids))
    assert len(kept) == 1 and "1 of 1 matmuls in int8" in str(kept[0][1])


@pytest.mark.parametrize("name", ["bmm", "left", "heads", "chosen"])
def test_gradients_are_near_those_of_floats(name: str) -> None:
    """They pass straight through to x and to the weights, also of matrices that nobody chose."""
    model, x = Stacked(WAYS[name]), torch.randn(WAYS[name].x, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="qfx", options={"minimum_gain": 0}, fullgraph=True)
    leaves = (x, model.weight)
    exact = torch.autograd.grad(model(x, IDS).square().sum(), leaves)
    found = torch.autograd.grad(compiled(x, IDS).square().sum(), leaves)
    for each, wanted in zip(found, exact, strict=True):
        error = (each - wanted).norm() / wanted.norm()
        assert 0 < error < 0.03, error


# matmuls with a stack of weights that are no products of experts: two activations, as before
OTHERS: dict[str, tuple[tuple[int, ...], Call]] = {
    "broadcast": ((1, M, K), lambda x, w, i: x @ w),
    "several rows of each number": ((S, M, K), lambda x, w, i: x @ w[i]),
    "numbers with two axes": ((1, S, M, K), lambda x, w, i: x @ w[i[None]]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_product_of_experts(name: str) -> None:
    shape, call = OTHERS[name]
    model, x = Stacked(Way(shape, (E, K, N), call, "")).eval(), torch.randn(shape)
    with torch.no_grad():
        gm, _ = qfx.rewrite(qfx.trace(model, x, IDS), qfx.Config(minimum_gain=0))
        assert EXPERTS.operator not in [n.target for n in gm.graph.nodes]
        exact = model(x, IDS)
        assert (gm(x, IDS) - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_batched_mm_of_transformers(name: str) -> None:
    """Both products in int8, to the bits of the experts one by one, up to what lies between."""
    block, given = block_of(name), routed()
    block.config._experts_implementation = "batched_mm"
    compiled = torch.compile(block, backend="qfx", options={"minimum_gain": 0}, fullgraph=True)
    torch.compiler.reset()
    with torch.no_grad():
        _, plan = qfx.rewrite(qfx.trace(block, *given), qfx.Config(minimum_gain=0))
        assert "2 of 2 matmuls in int8" in str(plan), plan
        exact = qfx.nn.Experts.from_float(block, "w8a8")(*given)
        assert (compiled(*given) - exact).norm() < 1e-3 * exact.norm()


def test_explain_measures_them() -> None:
    model, x = Stacked(WAYS["chosen"]).eval(), torch.randn(S, K)
    report = qfx.explain(model, x, IDS, options={"minimum_gain": 0})
    (row,) = [row for row in report.rows if row.scheme != "float"]
    assert row.measured and row.sqnr_db is not None and row.sqnr_db > 35
    assert report.macs == (S * K * N, S * K * N, 0)
