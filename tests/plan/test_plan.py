"""Policy, without a kernel: patterns, gains, choice of scheme, options."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qfx
from qfx.cost.model import Estimate, Work
from qfx.match.matching import match
from qfx.match.site import Site
from qfx.plan.plan import Plan
from qfx.plan.policy import decide
from qfx.values.config import PRESETS, parse_options
from qfx.values.select import check_names, fits
from tests.lib.costs import FIXED_COSTS, Prices
from tests.lib.models import FEATURES, Block


class Linears(Prices):
    """Prices of these alone: products of activations do not gain."""

    def estimate(self, work: Work) -> Estimate:
        return Estimate(1.0, 2.0) if work.scheme is None else super().estimate(work)


GAIN = Linears(4.0, 1.0)


def _plan(config: qfx.Config, prices: Prices = GAIN) -> Plan:
    return decide(match(qfx.trace(Block(), torch.randn(2, 5, FEATURES))), config, prices)


def _int8(plan: Plan) -> list[str]:
    return [e.match.name for e in plan.entries if e.scheme is not None]


ALL = ["q", "k", "v", "gate", "up", "matmul_2", "lm_head"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ALL),
        ({"skip": ["lm_head"]}, ALL[:-1]),
        ({"skip": ["[qk]"]}, ALL[2:]),
        ({"skip": ["down"]}, [n for n in ALL if n != "matmul_2"]),  # a parameter's name
        ({"skip": ["*.weight"]}, ["matmul_2"]),
        ({"skip": ["lm_head.weight"]}, ALL[:-1]),  # tied: its own name is embed.weight
        ({"only": ["gate", "up"]}, ["gate", "up"]),
        ({"only": ["gate", "up"], "skip": ["up"]}, ["gate"]),
    ],
)
def test_patterns(options: dict[str, list[str]], expected: list[str]) -> None:
    assert _int8(_plan(qfx.Config(**options))) == expected  # type: ignore[arg-type]


def test_skip_of_the_call_site_leaves_a_tied_weight_alone() -> None:
    """lm_head shares embed's weight; its site is named after the call."""
    (entry,) = [
        e for e in _plan(qfx.Config(skip=("lm_head",))).entries if e.match.path == "lm_head"
    ]
    assert entry.reason == "skipped by the pattern 'lm_head'"


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.0", "model.layers.0.q", True),
        ("layers.0", "model.layers.01.q", False),
        ("layers.*.q", "model.layers.3.q", True),
        ("q", "model.layers.3.q", True),
        ("q", "model.layers.3.qq", False),
        ("model", "model.layers.3", True),
        ("", "model", False),
    ],
)
def test_fits(pattern: str, name: str, expected: bool) -> None:
    assert fits(pattern, [name]) is expected


def test_pattern_that_matches_nothing_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"skip: the pattern 'lmhead' matches nothing.*lm_head"):
        check_names(qfx.Config(skip=("lmhead",)), ["lm_head", "q"])


def test_slower_sites_stay_float_with_the_numbers() -> None:
    plan = _plan(qfx.Config(minimum_gain=1.5), Linears(1.4, 1.0))
    assert plan.quantized == 0
    assert plan.entries[0].reason == "int8 would be 1.40x float, below minimum_gain=1.5"


def test_the_least_gain_is_enough() -> None:
    assert _int8(_plan(qfx.Config(minimum_gain=1.5), Linears(1.5, 1.0))) == ALL


class Packing(Prices):
    """At every call it takes longer than int8 saves."""

    def training(self, work: Work) -> float:
        return 4.0


@pytest.mark.parametrize("trains", [False, True])
def test_a_weight_that_trains_is_packed_at_every_call_which_has_its_price(trains: bool) -> None:
    linear = nn.Linear(64, 8).requires_grad_(trains)
    (site,) = match(qfx.trace(linear, torch.randn(4, 64)))
    assert isinstance(site, Site)
    (entry,) = decide([replace(site, trains=True)], qfx.Config(), Packing(4.0, 1.0)).entries
    assert entry.estimate == Estimate(4.0, 5.0 if trains else 1.0)
    assert (entry.scheme is None) == trains


def test_zero_minimum_gain_quantizes_all() -> None:
    assert _int8(_plan(qfx.Config(minimum_gain=0), Linears(0.1, 1.0))) == ALL


@pytest.mark.parametrize("features", [128, 192, 80, 40, 8])
def test_the_default_rotates_any_number_of_features(features: int) -> None:
    gm = qfx.trace(nn.Linear(features, 8), torch.randn(4, features))
    (entry,) = decide(match(gm), qfx.Config(), GAIN).entries
    assert entry.scheme == qfx.Scheme(x=qfx.QSpec(symmetric=False), rotation=64)


@pytest.mark.parametrize(
    ("channels", "kernel", "rotation"), [(64, 3, 64), (48, 3, 16), (40, 3, 64), (48, 1, 64)]
)
def test_windows_are_rotated_within_pixels_if_channels_allow_it(
    channels: int, kernel: int, rotation: int
) -> None:
    conv = nn.Conv2d(channels, 8, kernel, padding=kernel // 2, stride=2)
    gm = qfx.trace(conv, torch.randn(1, channels, 8, 8))
    (entry,) = decide(match(gm), qfx.Config(minimum_gain=0), GAIN).entries
    assert entry.scheme is not None and entry.scheme.rotation == rotation
    assert qfx.Scheme().block(64, channels) == qfx.Scheme(rotation=64).block(1, channels) == 0


class Products(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x) @ x.mT


@pytest.mark.parametrize("preset", ["w8a8", "w7a7"])
def test_products_of_activations_say_what_is_done_to_them(preset: str) -> None:
    """They are not rotated; attention is, and symmetric in 8 bits per row, whatever the scheme."""
    gm = qfx.trace(Products(), torch.randn(1, 2, 64, 64))
    plan = decide(match(gm), qfx.Config(scheme=preset), Prices(4.0, 1.0))
    product = {"w8a8": "xa8r_ws8r", "w7a7": "xs7r_ws7r"}[preset]
    assert [str(e.scheme) for e in plan.entries] == ["xs8r_ws8r_h64", product]


def test_plan_prints_every_matmul() -> None:
    plan = _plan(qfx.Config())
    text = str(plan)
    assert all(e.match.node.name in text and e.reason in text for e in plan.entries)
    assert text.endswith("7 of 9 matmuls in int8")


@pytest.mark.parametrize(
    ("options", "error", "phrase"),
    [
        (
            {"skp": ["a"]},
            ValueError,
            r"^unknown option 'skp', did you mean skip\? Options of",
        ),
        ({"scheme": "w4a4"}, ValueError, "unknown scheme 'w4a4'; the presets are w8a8"),
        ({"skip": "lm_head"}, TypeError, "takes a list of patterns, got 'lm_head'"),
        ({"skip": [3]}, TypeError, r"takes a list of patterns, got \[3\]"),
        ({"skip": None}, TypeError, "takes a list of patterns, got None"),
        ({"scheme": ["w8a8"]}, ValueError, "unknown scheme"),
        ({"minimum_gain": -1}, ValueError, "minimum_gain=-1"),
        ({"minimum_gain": "2"}, ValueError, "minimum_gain='2'"),
        ({"inner": "nvfuser"}, ValueError, "unknown inner compiler 'nvfuser'"),
        ({"inner": "eager", "cpp_wrapper": True}, ValueError, "inner compiler 'eager'"),
    ],
)
def test_wrong_options(options: dict[str, object], error: type[Exception], phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        parse_options(options)


def test_options_of_inductor_are_passed_on() -> None:
    config, rest = parse_options({"minimum_gain": 0, "cpp_wrapper": True, "cpp.threads": 1})
    assert config.minimum_gain == 0
    assert rest == {"cpp_wrapper": True, "cpp.threads": 1}


TENSOR = qfx.QSpec(axes=qfx.PER_TENSOR)
STATIC, COLUMN = (qfx.QSpec(axes=axes, static=True) for axes in (qfx.PER_TENSOR, qfx.PER_COLUMN))


@pytest.mark.parametrize(
    ("make", "phrase"),
    [
        (lambda: qfx.QSpec(bits=9), r"bits=9 is outside 2\.\.8"),
        (lambda: qfx.QSpec(axes=(2,)), r"axes=\(2,\) is neither"),
        (lambda: qfx.QSpec(group=48), "group=48 is no multiple of 32"),
        (lambda: qfx.QSpec(group=64, axes=qfx.PER_TENSOR), "group=64 cuts rows"),
        (lambda: qfx.QSpec(static=True), "per tensor or per column, not per row"),
        (lambda: qfx.Scheme(rotation=32), "rotation=32 is none of 0, 16, 64"),
        (lambda: qfx.Scheme(backward="int4"), "backward='int4' is none of float, int8"),
        (lambda: qfx.Scheme(qfx.QSpec(group=64), qfx.QSpec(group=32)), "groups of 64 and .* 32"),
        (lambda: qfx.Scheme(x=qfx.QSpec(group=64), w=TENSOR), "s8g64 needs a weight.*not s8t"),
        (lambda: qfx.QSpec(group=64, static=True), "not per row"),
        (lambda: qfx.Scheme(w=STATIC), "its scale cannot be static"),
        (lambda: qfx.Scheme(w=replace(TENSOR, symmetric=False)), "a8t has zero points"),
        (lambda: qfx.Scheme(x=None, w=qfx.QSpec(group=64)), "one scale for each row.*s8g64"),
        (
            lambda: qfx.Scheme(x=None, w=qfx.QSpec(symmetric=False)),
            "zero point, or a packed one, not a8r",
        ),
        (lambda: qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_COLUMN)), "per column is static"),
        (lambda: qfx.Scheme(x=COLUMN, w=qfx.QSpec(axes=qfx.PER_COLUMN)), "only one operand"),
    ],
)
def test_impossible_schemes(make: object, phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        make()  # type: ignore[operator]


def test_values_are_hashable_and_print_as_one_token() -> None:
    scheme = qfx.Scheme(x=qfx.QSpec(bits=4, symmetric=False, axes=qfx.PER_TENSOR))
    assert str(scheme) == "xa4t_ws8r"
    grouped = qfx.QSpec(bits=4, symmetric=False, group=128)
    assert str(qfx.Scheme(x=STATIC, w=grouped, rotation=16)) == "xs8T_wa4g128_h16"
    assert str(qfx.Scheme(backward="int8", rotation=16)) == "xs8r_ws8r_g8_h16"
    assert str(PRESETS["w8a8-groups"]) == "xs8g64_ws8g64_h64"
    assert str(qfx.Scheme(x=None)) == "ws8r"
    assert str(qfx.Scheme(x=COLUMN)) == "xs8C_ws8r"
    assert hash(qfx.Config(scheme=scheme)) == hash(qfx.Config(scheme=scheme))


def test_module_names_that_look_like_numbers_print_as_they_are() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(*[nn.Linear(8, 8) for _ in range(11)]))
    text = str(qfx.rewrite(qfx.trace(model), qfx.Config(minimum_gain=0))[1])
    assert "\n1.10 " in text and "\n1.0 " in text


def test_names_of_an_unscripted_module() -> None:
    """A module list, an attribute that needs getattr, and a bare parameter."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stack[0](x)

    found: list[str] = []

    def look(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        found.extend(m.name for m in match(gm))
        return gm.forward

    with torch.no_grad():
        torch.compile(Outer(), backend=look)(torch.randn(2, 4))
    assert found == ["stack.0.0", "stack.0.1"]


@pytest.mark.parametrize(
    ("conv", "pixels"),
    [
        (nn.Conv2d(16, 64, 3, padding=1), 9),
        (nn.Conv1d(16, 64, 5), 5),
        (nn.Conv2d(64, 64, 3, groups=4), 4 * 9),  # each group reads its channels of a pixel
        (nn.Conv2d(16, 64, 1), 0),
        (nn.Conv2d(16, 64, 4, stride=4), 0),  # patches are views
    ],
    ids=str,
)
def test_reading_windows_costs_time_for_each_pixel(conv: Any, pixels: int) -> None:
    x = torch.randn(1, conv.in_channels, *(16,) * (conv.weight.dim() - 2))
    (found,) = match(qfx.trace(conv, x))
    site = getattr(found, "site", found)
    assert site.pixels == pixels
    cost, scheme = FIXED_COSTS.cpu, qfx.Scheme(x=qfx.QSpec(symmetric=False))
    assert cost is not None
    work = Work.linear(100, site.k, 64, torch.float32, scheme)
    plain, read = (cost.estimate(replace(work, pixels=p)) for p in (0, pixels))
    assert math.isclose(read.int8_s - plain.int8_s, 100 * pixels * 5e-9, abs_tol=1e-12)
    assert math.isclose(read.float_s, plain.float_s * (0.75 if pixels else 1))
    if pixels:
        whole = cost.estimate(replace(work, pixels=pixels, gathered=True))
        assert math.isclose(whole.int8_s - plain.int8_s, 100 * site.k * 6e-9, abs_tol=1e-12)


def test_windows_of_few_channels_stay_float() -> None:
    """With times for which other windows become int8."""
    for channels, int8 in ((1, False), (64, True)):
        gm = qfx.trace(nn.Conv2d(channels, 64, 3, padding=1), torch.randn(1, channels, 32, 32))
        (entry,) = decide(match(gm), qfx.Config(), FIXED_COSTS.cpu).entries
        assert (entry.scheme is not None) == int8, entry.reason
