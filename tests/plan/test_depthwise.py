"""Decisions on depthwise convolutions: by the measured times of pixels, of four taps, and of float
outputs and taps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qfx
from qfx.graph.capture import trace
from qfx.match.matching import match
from qfx.plan.policy import decide
from tests.lib.costs import fixed_tables

C = 16


def entry(conv: nn.Module, *sizes: int, costs: Any = None, **options: Any) -> Any:
    x = torch.randn(1, C, *sizes)
    with torch.no_grad():
        gm = trace(nn.Sequential(conv).eval(), x)
    (found,) = decide(match(gm, {}), qfx.Config(**options), costs).entries
    return found


@pytest.mark.parametrize(
    ("kernel", "stride", "gain"),
    [
        # In 1e-10 s for each of 1024 inputs. float: 1 of the call, 1, and 2 + taps * 0.2 for an
        # output; int8: 4, and 1 + quads * 0.4 for an output.
        (3, 1, (2 + 2 + 9 * 0.2) / (4 + 1 + 3 * 0.4)),
        (5, 1, (2 + 2 + 25 * 0.2) / (4 + 1 + 10 * 0.4)),
        (7, 1, (2 + 2 + 49 * 0.2) / (4 + 1 + 14 * 0.4)),
        (7, 2, (2 + (2 + 49 * 0.2) / 4) / (4 + (1 + 14 * 0.4) / 4)),
    ],
)
def test_the_predicted_gain_decides(kernel: int, stride: int, gain: float) -> None:
    conv = nn.Conv2d(C, C, kernel, stride, kernel // 2, groups=C)
    found = entry(conv, 8, 8, costs=fixed_tables())
    assert found.estimate.gain == pytest.approx(gain)
    assert (found.scheme is not None) == (gain >= qfx.Config().minimum_gain)
    assert entry(conv, 8, 8, costs=fixed_tables(), minimum_gain=0).scheme is not None
    assert entry(conv, 8, 8).scheme is not None, "without measurements"


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("w8a8-static", "does not serve"),
        ("w4a8", "does not serve"),
        ("w8", "does not serve"),
    ],
)
def test_schemes_that_have_no_kernel(scheme: str, words: str) -> None:
    conv = nn.Conv2d(C, C, 7, padding=3, groups=C)
    found = entry(conv, 8, 8, scheme=scheme, minimum_gain=0)
    assert found.scheme is None and words in found.reason


def test_gradients_keep_it_float() -> None:
    model = nn.Sequential(nn.Conv2d(C, C, 7, padding=3, groups=C))
    _, plan = qfx.rewrite(
        qfx.trace(model, torch.randn(1, C, 8, 8)), qfx.Config(minimum_gain=0), training=True
    )
    assert plan.entries[0].reason == "a depthwise convolution, which has no gradient in int8"
