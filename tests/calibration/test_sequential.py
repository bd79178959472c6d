"""Codes that are found one group after the other, (Q11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx import PER_COLUMN, QSpec, Recipe, Scheme
from qfx.calibration.gptq import ComparedMoments, Hessian, ordered, rounded_codes
from tests.lib.pairs import every
from tests.lib.rounded import K, Net, batches, calibrated, codes_of, operands, run


def in_turn(model: nn.Module, scheme: Any = "w4a8", **keywords: Any) -> Recipe:
    return calibrated(model, scheme, rounding="gptq-sequential", **keywords)


def same_codes(one: Recipe, other: Recipe) -> list[str]:
    a, b = codes_of(one), codes_of(other)
    assert a.keys() == b.keys()
    return [name for name in a if torch.equal(a[name], b[name])]


class Patches(nn.Module):
    """A product that is seen through views, of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.out = nn.Conv2d(1, 24, 8, stride=8), nn.Linear(48, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cut(x.reshape(-1, 1, 8, 16)).relu().flatten(1))


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(K, K), nn.Tanh())]).eval()


# --- of one weight ---


def test_inputs_that_lost_nothing_give_the_codes_of_gptq() -> None:
    w, x = operands(12, 150)
    plain, compared = Hessian(150), ComparedMoments(150)
    plain.update(x)
    compared.compare(x, x)
    codes = [rounded_codes(w, QSpec(bits=4), ordered(h)) for h in (plain, compared)]
    assert torch.equal(*codes)


@pytest.mark.parametrize("noise, rows", every([1e-3, 0.1, 3.0], [5, 301]))
def test_what_codes_stand_for_loses_no_more_than_the_weight(noise: float, rows: int) -> None:
    """Of what it gives for inputs in float, on the inputs that are there: a part of the way to the
    least of a convex function. Up to the float32 rounding of sums."""
    w, exact = operands(12, 150)
    exact = exact[:rows]
    x = exact + noise * torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    moments = ComparedMoments(150)
    moments.compare(exact, x)
    ways = ordered(moments).ways_kk
    assert ways is not None
    wanted, aim = exact.double() @ w.double().t(), w.double() + w.double() @ ways.double()
    before, after = ((wanted - x.double() @ v.t()).square().sum(1).sum() for v in (w.double(), aim))
    assert after <= before * (1 + 1e-3)


def test_faulty_rows_do_not_count() -> None:
    _, x = operands(1, 70)
    faulty = x.clone()
    faulty[1, 3], faulty[5, 2], faulty[6] = torch.nan, torch.inf, 1e20
    once, all_rows = ComparedMoments(70), ComparedMoments(70)
    kept = [i for i in range(len(x)) if i not in (1, 5, 6)]
    once.compare(x[kept] * 1.5, x[kept])
    all_rows.compare(faulty * 1.5, x)
    assert torch.equal(once.h_kk, all_rows.h_kk) and torch.equal(once.c_kk, all_rows.c_kk)


# --- of a model ---


SCHEMES: list[Any] = ["w8a8", "w4a8", "w8a8-static", Scheme(x=None, w=QSpec(bits=4))]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_one_site_has_the_codes_of_gptq(scheme: Any) -> None:
    model = nn.Sequential(nn.Linear(K, 33), nn.ReLU()).eval()
    assert same_codes(in_turn(model, scheme), calibrated(model, scheme)) == ["0"]


def test_the_first_group_has_the_codes_of_gptq_and_no_other() -> None:
    model = chain()
    recipe = in_turn(model)
    assert same_codes(recipe, calibrated(model, "w4a8")) == ["0"]
    assert str(recipe).count("rounded by sequential GPTQ") == 4


@pytest.mark.parametrize("make", [chain, lambda: Patches().eval()], ids=["chain", "patches"])
def test_a_model_loses_less_on_what_was_seen(make: Any) -> None:
    model, x = make(), torch.cat(batches())
    with torch.no_grad():
        wanted = model(x)
    lost = [
        (run(model, f(model, "w4a8"), x) - wanted).square().sum() for f in (in_turn, calibrated)
    ]
    assert lost[0] < lost[1]


def test_sites_that_are_left_out_stay_as_they_are() -> None:
    model = chain()
    config = qfx.Config(scheme="w4a8", minimum_gain=0, skip=("2",))
    recipe = qfx.calibrate(model, batches(), config, rounding="gptq-sequential", progress=False)
    assert set(codes_of(recipe)) == {"0", "4", "6"}


def test_a_site_without_codes_counts_as_it_is() -> None:
    recipe = in_turn(Net().eval(), Scheme(w=QSpec(axes=PER_COLUMN)))
    assert not codes_of(recipe)


def test_batches_may_have_any_sizes() -> None:
    model, whole = chain(), torch.cat(batches())
    config, parts = qfx.Config(scheme="w4a8", minimum_gain=0), whole.split([5, 40, 75])
    given: dict[str, Any] = {"rounding": "gptq-sequential", "progress": False}
    recipe = qfx.calibrate(model, list(parts), config, **given)
    assert len(codes_of(recipe)) == 4


def test_a_model_of_several_graphs_is_refused() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            torch._dynamo.graph_break()
            return self.c(y)

    with pytest.raises(ValueError, match="needs a model of one graph, but 2 were captured"):
        in_turn(Broken().eval())
    assert len(codes_of(calibrated(Broken().eval()))) == 2
