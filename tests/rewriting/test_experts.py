"""Products of experts in graphs: how they are found, decided and rewritten."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers its operator)
from torch import Tensor, fx, nn

import qfx
from qfx.cost.model import Estimate, Work
from qfx.match.matching import match
from qfx.ops.forms import EXPERTS
from qfx.plan.policy import decide
from tests.conftest import same_bits

E, N, K = 3, 96, 128
ENDS = (7, 7, 20)
ops = torch.ops.qfx


def grouped(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(x, w, offs=offsets)


def unnamed(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, offs=offsets)


def fallback(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    y: Tensor = torch.ops.transformers.grouped_mm_fallback(x, w, offsets)
    return y


class Experts(nn.Module):
    """Multiplies sorted rows by the weights of their experts, [E, N, K] or [E, K, N]."""

    def __init__(
        self, multiply: Callable[..., Tensor], transposed: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.multiply, self.transposed = multiply, transposed
        torch.manual_seed(0)
        w = torch.randn(E, N, K) / K**0.5
        self.weight = nn.Parameter((w if transposed else w.mT.contiguous()).to(dtype))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        w = self.weight.transpose(-2, -1) if self.transposed else self.weight
        return self.multiply(x, w, offsets)

    def linears(self, scheme: str) -> list[nn.Module]:
        """Returns the experts as int8 linears."""
        made = []
        for w in self.weight.detach() if self.transposed else self.weight.detach().mT:
            linear = nn.Linear(K, N, bias=False, dtype=w.dtype)
            linear.weight = nn.Parameter(w.contiguous())
            made.append(qfx.quantize_(nn.Sequential(linear), scheme)[0])  # type: ignore[index]
        return made


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(ENDS[-1], K, generator=g).to(dtype), torch.tensor(ENDS, dtype=torch.int32)


def one_by_one(model: Experts, scheme: str, x: Tensor) -> Tensor:
    parts = zip(model.linears(scheme), pairwise((0, *ENDS)), strict=True)
    return torch.cat([linear(x[begin:end]) for linear, (begin, end) in parts])


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-groups", "w4a8"])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("multiply", "dtype"),
    [(grouped, torch.bfloat16), (unnamed, torch.bfloat16), (fallback, torch.float32)],
)
def test_it_has_the_bits_of_linears(
    multiply: Callable[..., Tensor], dtype: torch.dtype, transposed: bool, scheme: str
) -> None:
    """Traced and rewritten, and compiled: as a loop over int8 linears of the same scheme."""
    model, (x, offsets) = Experts(multiply, transposed, dtype).eval(), inputs(dtype)
    config = qfx.Config(scheme=scheme, minimum_gain=0)
    with torch.no_grad():
        expected = one_by_one(model, scheme, x)
        gm, plan = qfx.rewrite(qfx.trace(model, x, offsets), config)
        assert "1 of 1 matmuls in int8" in str(plan), plan
        assert [n.target for n in gm.graph.nodes].count(EXPERTS.operator) == 1
        assert same_bits(gm(x, offsets), expected)
        compiled = torch.compile(model, backend="qfx", options=config, fullgraph=True)
        assert same_bits(compiled(x, offsets), expected)


def test_it_packs_in_the_graph_what_it_may_not_keep() -> None:
    """A rewritten graph of a backend of its own has weights as inputs."""
    model, (x, offsets) = Experts(fallback, True, torch.float32).eval(), inputs()

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        rewritten, plan = qfx.rewrite(gm, qfx.Config(minimum_gain=0))
        assert "1 of 1 matmuls in int8" in str(plan)
        return rewritten.forward

    with torch.no_grad():
        found = torch.compile(model, backend=backend)(x, offsets)
        assert same_bits(found, one_by_one(model, "w8a8", x))


def test_a_weight_that_changes_is_packed_again() -> None:
    model, (x, offsets) = Experts(fallback, True, torch.float32).eval(), inputs()
    compiled = torch.compile(model, backend="qfx", options={"minimum_gain": 0})
    with torch.no_grad():
        before = compiled(x, offsets)
        model.weight[2].mul_(2.0)
        after = compiled(x, offsets)
    assert same_bits(after[:7], before[:7]) and same_bits(after[7:], 2 * before[7:])


class Call(nn.Module):
    """Calls a function of its weight and two tensors."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call, self.weight = call, nn.Parameter(torch.randn(E, K, N).bfloat16())

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.call(self.weight, x, other)


X, OFFSETS = inputs(torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda w, x, o: F.grouped_mm(x, w), (X.expand(E, *X.shape).contiguous(), OFFSETS)),
        (lambda w, x, o: F.grouped_mm(x.t(), x, offs=o), (X, OFFSETS)),
        (lambda w, x, v: F.grouped_mm(x, v, offs=OFFSETS), (X, X.new_ones(E, K, N))),
    ],
)
def test_what_is_no_product_of_experts(call: Callable[..., Tensor], given: Any) -> None:
    """A batch, a gradient of weights, and weights that are computed."""
    with torch.no_grad():
        _, plan = qfx.rewrite(qfx.trace(Call(call).eval(), *given), qfx.Config(minimum_gain=0))
    (entry,) = plan.entries
    assert entry.scheme is None and "no product of rows with the weights of" in entry.reason


@pytest.mark.parametrize("scheme", ["w8", "w4"])
def test_schemes_that_it_does_not_serve(scheme: str) -> None:
    model, (x, offsets) = Experts(fallback, True, torch.float32).eval(), inputs()
    with torch.no_grad():
        _, plan = qfx.rewrite(qfx.trace(model, x, offsets), qfx.Config(scheme=scheme))
    assert "does not serve" in plan.entries[0].reason and plan.quantized == 0


@pytest.mark.parametrize("pattern", ["weight", "*weigh?"])
def test_patterns_name_the_parameter(pattern: str) -> None:
    model, (x, offsets) = Experts(fallback, True, torch.float32).eval(), inputs()
    config = qfx.Config(minimum_gain=0, skip=[pattern])
    with torch.no_grad():
        _, plan = qfx.rewrite(qfx.trace(model, x, offsets), config)
    assert plan.quantized == 0 and "skip" in plan.entries[0].reason


class Router(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.gate = nn.Linear(K, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).softmax(-1).topk(2).indices


@pytest.mark.parametrize(("outputs", "quantized"), [(64, 0), (4096, 1)])
def test_a_router_stays_float(outputs: int, quantized: int) -> None:
    """What chooses among a few outputs; words of a vocabulary may be chosen by int8."""
    x = torch.randn(9, K)
    with torch.no_grad():
        _, plan = qfx.rewrite(qfx.trace(Router(outputs).eval(), x), qfx.Config(minimum_gain=0))
    assert plan.quantized == quantized
    assert quantized or "a router of experts stays float" in plan.entries[0].reason


def test_explain_measures_them() -> None:
    """Of the three experts two have rows; a call reads the weights of three at most."""
    model, (x, offsets) = Experts(fallback, True, torch.float32).eval(), inputs()
    report = qfx.explain(model, x, offsets, options={"minimum_gain": 0})
    (row,) = [row for row in report.rows if row.scheme != "float"]
    assert row.measured and row.sqnr_db is not None and row.sqnr_db > 35
    assert report.macs == (ENDS[-1] * K * N, ENDS[-1] * K * N, 0)
    assert row.weight_bytes is not None and 3 * K * N < row.weight_bytes < 3.3 * K * N
    assert row.bits is not None and 8 < row.bits < 9


@pytest.mark.parametrize(("rows", "each", "hit"), [(48, 16, 3), (2, 1, 2)])
def test_costs_are_those_of_the_rows_of_an_expert(rows: int, each: int, hit: int) -> None:
    model = Experts(fallback, True, torch.float32).eval()
    given = (torch.randn(rows, K), torch.tensor([0, 1, rows], dtype=torch.int32))
    with torch.no_grad():
        gm = qfx.trace(model, *given)
        plan = decide(match(gm), qfx.Config(minimum_gain=0.01), _Cost())
    (entry,) = plan.entries
    assert f"for {each} of {rows} rows to each of {hit} experts" in entry.reason
    assert entry.estimate == Estimate(hit * 2.0 * each, hit * 1.0 * each)


class _Cost:
    """Takes 2 seconds a row in float and 1 in int8."""

    def lacks(self, *_: Any) -> None:
        return None

    def estimate(self, work: Work) -> Estimate:
        assert (work.k, work.n) == (K, N)
        return Estimate(2.0 * work.m, 1.0 * work.m)

    def packing(self, work: Work) -> float:
        return 0.0

    training = packing
