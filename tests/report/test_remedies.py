"""What one may do about a matmul, told by the reasons that explain gives."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import qfx
from qfx.plan.policy import _NOT_PINNED
from qfx.report.remedies import FIXED, INT8, remedy_of
from qfx.report.report_row import Row


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.few, self.idle = nn.Linear(4, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) + self.few(x[..., :4])


OPTIONS = {
    "change skip": {"skip": ["up"], "minimum_gain": 0},
    "change only": {"only": ["down"], "minimum_gain": 0},
    "set minimum_gain=0": {"minimum_gain": 1000},
    INT8: {"minimum_gain": 0},
}


@pytest.mark.parametrize("remedy", OPTIONS)
def test_each_reason_has_its_remedy(remedy: str) -> None:
    report = qfx.explain(Net().eval(), torch.randn(32, 64), options=OPTIONS[remedy])
    found = {row.module: remedy_of(row) for row in report.rows}
    assert found["up"] == remedy
    assert found["few"] == ("change only" if remedy == "change only" else FIXED)
    assert found["idle"] == "explain with other inputs"


def test_what_a_pinned_plan_does_not_name() -> None:
    assert remedy_of(Row("a", "", "1x1x1", "float", "", _NOT_PINNED)) == "pin the plan again"


def test_a_report_is_plain_values() -> None:
    report = qfx.explain(Net().eval(), torch.randn(32, 64), options={"minimum_gain": 0})
    found = json.loads(json.dumps(report.to_dict()))
    assert [row["module"] for row in found["rows"]] == [row.module for row in report.rows]
    assert [row["remedy"] for row in found["rows"]] == [remedy_of(row) for row in report.rows]
    assert report.whole is not None and found["whole"]["sqnr_db"] == report.whole.sqnr_db
    assert found["multiply_adds"]["all"] == report.macs[1]
    assert found["int8_matmuls"] == report.quantized
    assert report.weights is not None and found["weights"]["quantized"] == report.weights.quantized


def test_json_has_no_infinity() -> None:
    row = Row("a", "", "1x1x1", "s", "k", "why", sqnr_db=math.inf)
    text = json.dumps(qfx.Report((row,), 1).to_dict(), allow_nan=False)
    assert json.loads(text)["rows"][0]["sqnr_db"] is None


def test_an_int8_row_needs_nothing() -> None:
    assert remedy_of(Row("a", "", "1x1x1", "xs8r_ws8r", "k", "below minimum_gain")) == INT8
