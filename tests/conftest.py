"""Fixtures and profiles shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from qfx.cost import AXES, CostTable, Grid

torch.set_num_threads(2)
settings.register_profile(
    "quick", max_examples=60, deadline=None, derandomize=True, print_blob=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile(
    "long", settings.get_profile("quick"), max_examples=3000, derandomize=False
)
settings.load_profile(os.environ.get("QFX_TEST_PROFILE", "quick"))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _grid(per_mac: float, overhead: float) -> Grid:
    rows, ks, ns = AXES
    return tuple(tuple(tuple(m * k * n * per_mac + overhead for n in ns) for k in ks) for m in rows)


FIXED_COST = CostTable(_grid(1e-10, 1e-6), _grid(0.4e-10, 5e-6), symmetric_saving=0.0)


@pytest.fixture(autouse=True)
def fixed_cost(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiler tests never measure: float takes 2.5 times as long per multiply-accumulate."""
    if "real_cost" not in request.keywords:
        monkeypatch.setattr("qfx.cost.table", lambda dtype, threads, isa: FIXED_COST)
