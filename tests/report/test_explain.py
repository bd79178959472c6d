"""explain: every matmul is a row, with its error and times; on modules, functions and graphs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.report.report_row import Row, range_of
from tests.lib.models import FEATURES, Block, compiled

X = torch.randn(2, 5, FEATURES)
ALL = {"minimum_gain": 0, "scheme": "w8a8-asymmetric"}


def test_block() -> None:
    report = qfx.explain(Block(), X, options=ALL)
    assert (report.quantized, report.total, report.graphs) == (7, 9, 1)
    for row in report.rows:
        if row.scheme == "float":
            assert (
                "a matmul of two activations: int8 would be 0." in row.reason
                and row.sqnr_db is None
            )
        else:
            assert row.sqnr_db is not None and 25 < row.sqnr_db < 60
            assert row.measured and row.float_s and row.int8_s and row.kernel


def test_report_prints_as_a_table() -> None:
    text = str(qfx.explain(Block(), X, options=ALL))
    for word in ("lm_head", "10x32x32", "xa8r_ws8r", "SQNR dB", "float us", "int8 us"):
        assert word in text
    assert text.splitlines()[-1] == "7 of 9 matmuls in int8, 1 graph(s)"


def test_sites_left_float_by_cost_show_predicted_times() -> None:
    report = qfx.explain(Block(), X)
    row = report.rows[0]
    assert row.scheme == "float" and "below minimum_gain=1.1" in row.reason
    assert row.float_s and row.int8_s and not row.measured
    assert "~" in str(report)


def test_bad_site_has_a_low_sqnr() -> None:
    """An outlier shared by no other feature leaves few codes for the rest of its row."""
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    fine = qfx.explain(model, x, options=ALL).rows[0].sqnr_db
    x[:, 0] = 1000
    model.weight.data[:, 0] = 0
    bad = qfx.explain(model, x, options=ALL).rows[0].sqnr_db
    assert fine is not None and bad is not None and bad < fine - 20


def test_functions_keywords_and_compiled_models() -> None:
    model = Block()

    def function(x: Tensor, *, scale: float) -> Tensor:
        return model(x) * scale

    assert qfx.explain(function, X, scale=2.0, options=ALL).quantized == 7
    assert qfx.explain(compiled(model), X, options=ALL).quantized == 7


def test_graph_modules() -> None:
    model = Block()
    assert qfx.explain(qfx.trace(model), X, options=ALL).quantized == 7
    exported = torch.export.export(model, (X,)).module()
    assert qfx.explain(exported, X, options=ALL).quantized == 7
    assert qfx.explain(qfx.trace(model), options=ALL, x=X).quantized == 7  # by name


def test_the_model_is_not_changed_and_runs_in_float() -> None:
    model = Block()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    qfx.explain(model, X, options=ALL)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_wrong_pattern_and_option() -> None:
    with pytest.raises(ValueError, match="'lmhead' matches nothing"):
        qfx.explain(Block(), X, options={"skip": ["lmhead"]})
    with pytest.raises(ValueError, match="unknown option"):
        qfx.explain(Block(), X, options={"skp": []})


def test_the_same_site_called_twice_is_two_rows() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.a(x))

    assert qfx.explain(Twice(), torch.randn(4, 8), options=ALL).quantized == 2


def test_explaining_many_times_does_not_exhaust_dynamo() -> None:
    """Each call used to leave an entry in Dynamo's cache, and eight of them disable compilation."""
    model = Block()
    for _ in range(12):
        assert qfx.explain(model, X, options=ALL).quantized == 7
    with torch.no_grad():
        assert not torch.equal(compiled(model)(X), model(X))


def test_modules_compiled_in_place() -> None:
    model = Block()
    model.compile(backend="eager")
    assert qfx.explain(model, X, options=ALL).quantized == 7


def test_nothing_captured_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    with pytest.warns(UserWarning, match="saw no graph"):
        assert qfx.explain(Block(), X).quantized == 0


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))


class _Loop(nn.Module):
    """A graph break in a loop: Dynamo captures the layers' frame once and runs it for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.unused = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


def test_layers_that_share_a_graph_have_their_own_lines_and_nothing_is_missing() -> None:
    report = qfx.explain(_Loop(), X, options=ALL)
    int8 = [row.module for row in report.rows if row.scheme != "float"]
    assert int8 == [f"layers.{i}.fc" for i in range(3)]
    (unseen,) = [row for row in report.rows if row.scheme == "float"]
    assert unseen.module == "unused" and "in no captured graph" in unseen.reason


def test_transform_and_outliers_of_the_input() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40)), torch.ones(8, 64)
    x[3, 5] = -100
    report = qfx.explain(model, x, options={**ALL, "scheme": qfx.Scheme(rotation=64)})
    assert [row.transform for row in report.rows] == ["R64", "R64"]
    first = report.rows[0]
    assert first.input_max == 100 and first.input_rms == pytest.approx(
        ((8 * 64 - 1 + 100**2) / (8 * 64)) ** 0.5
    )
    assert first.outlier_ratio == pytest.approx(100 / first.input_rms)
    assert f" {first.outlier_ratio:.1f} " in str(report)
    (column,) = qfx.explain(nn.Linear(40, 64), x[:, :40], options={**ALL, "scheme": COLUMN}).rows
    assert column.transform == "factor"


COLUMN = qfx.Scheme(w=qfx.QSpec(axes=(0,)))


def test_sites_left_float_show_their_inputs_range() -> None:
    report = qfx.explain(Block(), X)
    assert report.quantized == 0
    assert all(row.input_max and row.input_max >= row.input_rms > 0 for row in report.rows)  # type: ignore[operator]
    assert all(row.transform == "" for row in report.rows)


def _row(sqnr_db: float | None) -> Row:
    return Row("m", "n", "1x1x1", "s", "", "", sqnr_db=sqnr_db)


@pytest.mark.parametrize(
    "levels, shares",
    [
        ((30.0, None, 30.0), (0.5, None, 0.5)),
        ((20.0, 30.0), (10 / 11, 1 / 11)),
        ((math.inf, 30.0), (0.0, 1.0)),
        ((math.inf,), (0.0,)),
        ((-math.inf, 10.0), (1.0, 0.0)),
        ((4000.0, 3990.0), (0.0, 0.0)),  # less than float64 holds
        ((None,), (None,)),
        ((), ()),
    ],
)
def test_shares_are_noise_relative_to_signal(levels: Any, shares: Any) -> None:
    found = qfx.Report(tuple(map(_row, levels)), 1).shares
    assert found == pytest.approx(shares)


def test_shares_are_of_the_predicted_divergence_where_it_is_known() -> None:
    rows = [replace(_row(30.0), divergence=d) for d in (0.003, None, 0.001, 0.0)]
    assert qfx.Report(tuple(rows), 1).shares == pytest.approx((0.75, None, 0.25, 0.0))


def test_a_recipe_says_what_its_sites_cost() -> None:
    model, given = Block(), [X]
    options = {"progress": False, "max_divergence": 1.0, "loss": "direction"}
    recipe = qfx.calibrate(model.eval(), given, qfx.Config(minimum_gain=0), **options)
    report = qfx.explain(model, X, options={"recipe": recipe, "minimum_gain": 0})
    wanted = [site.divergence for site in recipe.sites]
    assert [r.divergence for r in report.rows if r.divergence is not None] == wanted
    assert report.shares[0] == pytest.approx((wanted[0] or 0) / sum(d or 0 for d in wanted))


def test_shares_of_a_model_sum_to_one() -> None:
    report = qfx.explain(Block(), X, options=ALL)
    assert sum(share or 0 for share in report.shares) == pytest.approx(1)
    worst = min((r for r in report.rows if r.sqnr_db is not None), key=lambda r: r.sqnr_db or 0)
    assert max(s or 0 for s in report.shares) == report.shares[report.rows.index(worst)]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_ranges_do_not_overflow(scale: float) -> None:
    found = range_of(torch.tensor([3.0, -4.0]) * scale)
    assert found == pytest.approx((4 * scale, 12.5**0.5 * scale))


def test_ranges_of_empty_zero_and_faulty_inputs() -> None:
    assert range_of(torch.zeros(0, 3)) == range_of(torch.zeros(2, 3)) == (0, 0)
    assert range_of(torch.tensor([1.0, math.inf])).input_max == math.inf
    assert math.isnan(range_of(torch.tensor([1.0, math.nan])).input_max)


class _Experts(nn.Module):
    """A linear, a convolution and experts that no graph multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        self.conv = nn.Conv1d(64, 64, 4, groups=16, bias=False)  # of 4 outputs: float
        self.experts = nn.Parameter(torch.randn(8, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(self.linear(x).mT)
        return y


def test_the_footer_counts_the_whole_model() -> None:
    """Weights: 1, 1/4 and 8 matrices of 64 x 64; multiply-adds: 10 rows of the first, 7 of the
    second."""
    report = qfx.explain(_Experts(), torch.randn(1, 10, 64), options={"minimum_gain": 0})
    assert report.macs == (10 * 64**2, (10 * 4 + 7) * 32**2, 0)
    assert report.weights is not None and report.weights.share == 4 / 37
    text = str(report)
    assert f"int8: 10.8% of the bytes of weights that multiply, {40 / 47:.1%} of 48,128" in text
    assert "float: _Experts 131.1 kB, Conv1d 4.1 kB" in text
    row = report.rows[0]
    assert row.weight_bytes and f"{(row.weight_bytes + 33 * 64**2) / 1e6:.3g} MB read" in text


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_of_groups_are_measured(channels_last: bool) -> None:
    """Each with what it reads in the model, without the norm and the activation behind it."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 32, 3, groups=2), nn.Conv2d(32, 32, 7, padding=3, groups=32)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 1)).eval()
    x = torch.randn(2, 16, 12, 12)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    report = qfx.explain(model, x, options={"minimum_gain": 0})
    assert [row.measured for row in report.rows] == [True] * 3
    assert all(33 < row.sqnr_db < 60 for row in report.rows)  # type: ignore[operator]
    assert all(row.kernel for row in report.rows)
