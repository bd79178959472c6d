"""The cost model: kept on disk, read back, robust, and sane between its measured points."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qfx
from qfx.cost import batches, corrections, grid_timing
from qfx.cost.grid import Axes, Grid
from qfx.cost.linears import AXES, BLOCK
from qfx.cost.machine import MachineCost
from qfx.cost.model import Estimate, Work
from qfx.cost.table import Table
from qfx.cost.timing import fastest
from qfx.ops.forms import form_of
from qfx.ops.header import PANEL
from qfx.ops.packing import Packing
from qfx.weights.cache import pack
from tests.conftest import on_threads
from tests.lib.costs import FIXED, fixed_tables

MACHINE = (torch.float32, 1, "ref")
ASYMMETRIC = qfx.Scheme(x=qfx.QSpec(symmetric=False))
GROUPS = qfx.Scheme(w=qfx.QSpec(bits=4, group=64))
ZERO_POINTS = qfx.Scheme(w=qfx.QSpec(symmetric=False))  # of weights, without groups
GROUPS_OF_X = qfx.Scheme(x=qfx.QSpec(group=64))
WEIGHT_ONLY = qfx.Scheme(x=None)
SINGLE = FIXED["int8"]
FIXED_COST = fixed_tables()


def estimate(
    model: MachineCost, m: int, k: int, n: int, scheme: qfx.Scheme = ASYMMETRIC, outliers: int = 0
) -> Estimate:
    return model.estimate(Work.linear(m, k, n, torch.float32, scheme, outliers))


def with_numbers(**numbers: tuple[float, ...]) -> MachineCost:
    """The fixed cost model, with other numbers for a single GEMM."""
    return fixed_tables(int8=replace(SINGLE, numbers={**SINGLE.numbers, **numbers}))


# --- a single int8 GEMM ---


@given(st.integers(0, 5000), st.integers(0, 20000), st.integers(0, 20000))
def test_estimates_are_positive_and_finite(m: int, k: int, n: int) -> None:
    found = estimate(FIXED_COST, m, k, n)
    assert 0 < found.float_s < math.inf and 0 < found.int8_s < math.inf


@given(*(st.integers(0, len(points) - 1) for points in AXES))
def test_measured_points_are_returned_as_measured(i: int, j: int, k: int) -> None:
    shape = (AXES[0][i], AXES[1][j], AXES[2][k])
    found = estimate(FIXED_COST, *shape)
    assert math.isclose(found.float_s, SINGLE.grids["float"].seconds[i][j][k], rel_tol=1e-9)
    whole = AXES[2].index(max(shape[2], PANEL))  # int8 works on whole panels
    assert math.isclose(found.int8_s, SINGLE.grids["int8"].seconds[i][j][whole], rel_tol=1e-9)


def test_beyond_the_grid_time_grows_with_the_work() -> None:
    near, far = (estimate(FIXED_COST, *size) for size in ((256, 2048, 2048), (512, 8192, 4096)))
    assert math.isclose(far.float_s / near.float_s, 2 * 4 * 2, rel_tol=0.01)


def test_a_symmetric_scheme_saves_the_zero_point() -> None:
    priced = with_numbers(symmetric=(1e-7,))
    cheap, dear = (estimate(priced, 256, 1024, 1024, s) for s in (qfx.Scheme(), ASYMMETRIC))
    assert math.isclose(dear.int8_s - cheap.int8_s, 256 * 1e-7, rel_tol=1e-6)


def test_uneven_sizes_cost_what_was_measured() -> None:
    """Float columns beyond a whole block count for more, from the M on where they were found to;
    int8 rows with features beyond a whole vector take longer."""
    dear = tuple(float(BLOCK if i else 0) for i in range(BLOCK))
    uneven = with_numbers(**{f"columns_{m}": dear for m in AXES[0][1:]}, uneven=(1e-7,))
    for m, n, like in ((1, 65, 65), (2, 65, 80), (300, 65, 80), (300, 64, 64)):
        found, expected = estimate(uneven, m, 128, n), estimate(FIXED_COST, m, 128, like)
        assert math.isclose(found.float_s, expected.float_s, rel_tol=1e-9)
    for n, like in ((64, 64), (65, 96), (96, 96)):  # int8 works on whole panels of 32
        a, b = (estimate(FIXED_COST, 300, 128, columns) for columns in (n, like))
        assert a.int8_s == b.int8_s
    for k, more in ((64, 0.0), (65, 1e-7)):
        a, b = (estimate(model, 300, k, 64) for model in (uneven, FIXED_COST))
        assert math.isclose(a.int8_s - b.int8_s, 300 * more, rel_tol=1e-6)


def test_a_static_scale_saves_a_look_at_every_element_and_costs_a_call() -> None:
    priced = with_numbers(static=(1e-8, 2e-11), static_call=(4e-6,))
    static = qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR, static=True))
    for m, saved in ((1, -4e-6 + 1e-8 + 1024 * 2e-11), (256, -4e-6 + 256 * (1e-8 + 1024 * 2e-11))):
        dear, cheap = (estimate(priced, m, 1024, 1024, s).int8_s for s in (ASYMMETRIC, static))
        assert math.isclose(dear - cheap, saved, rel_tol=1e-6)


# --- other kinds of weights, rotation, outliers, training ---


KIND_OF = {
    qfx.Scheme(): "int8",
    ASYMMETRIC: "int8",
    GROUPS: "groups",
    ZERO_POINTS: "groups",
    GROUPS_OF_X: "x_groups",
    WEIGHT_ONLY: "weight_only",
}


def test_rotation_costs_its_rows_and_elements() -> None:
    plain, rotated = qfx.Scheme(), qfx.Scheme(rotation=64)
    for k, added in (
        (1024, 256 * (1e-9 + 1024 * 1e-10)),
        (1023, 256 * (1e-9 + 1023 * 1e-10)),
        (1, 0.0),
    ):
        first, second = (estimate(FIXED_COST, 256, k, 512, s).int8_s for s in (plain, rotated))
        assert math.isclose(second - first, added, rel_tol=1e-6)


@pytest.mark.parametrize("scheme", KIND_OF, ids=str)
def test_outliers_are_a_float_linear_beside_the_others(scheme: qfx.Scheme) -> None:
    plain, split = (estimate(FIXED_COST, 64, 512, 256, scheme, count) for count in (0, 8))
    beside = estimate(FIXED_COST, 64, 8, 256).float_s
    assert split.float_s == plain.float_s
    assert math.isclose(split.int8_s - plain.int8_s, beside, rel_tol=1e-6)


@pytest.mark.parametrize("scheme", KIND_OF, ids=str)
def test_schemes_have_the_tables_of_their_kinds(scheme: qfx.Scheme) -> None:
    kind = KIND_OF[scheme]
    assert form_of(scheme).name == kind
    found = estimate(FIXED_COST, 64, 512, 256, scheme)
    assert found.float_s == FIXED[kind].grids["float"].linear(64, 512, 256)
    assert found.int8_s == FIXED[kind].grids["int8"].linear(64, 512, 256)
    rotated = estimate(FIXED_COST, 64, 512, 256, replace(scheme, rotation=64))
    turned = "turn" if scheme.x is None else "rotation"  # float activations have no other pass
    assert math.isclose(rotated.int8_s - found.int8_s, SINGLE.over(turned, 64, 512), rel_tol=1e-6)


@pytest.mark.parametrize("operand", ["x", "w"])
def test_groups_half_as_long_cost_twice_as_much_at_most(operand: str) -> None:
    coarse, known, fine = (
        estimate(FIXED_COST, 64, 512, 256, qfx.Scheme(**{operand: qfx.QSpec(group=g)}))
        for g in (128, 64, 32)
    )
    assert coarse == known and fine.int8_s == 2 * known.int8_s and fine.float_s == known.float_s


def test_training_turns_the_weight_and_both_gradients() -> None:
    m, k, n = 256, 1024, 512
    pack_s, again_s, codes_s = SINGLE.numbers["training"]
    plain = n * k * (pack_s + again_s) + m * k * codes_s
    turned = (
        SINGLE.over("rotation", n, k) + 2 * SINGLE.over("turn", n, k) + SINGLE.over("turn", m, k)
    )
    for scheme, expected in (
        (ASYMMETRIC, plain),
        (replace(ASYMMETRIC, rotation=64), plain + turned),
    ):
        found = FIXED_COST.training(Work.linear(m, k, n, torch.float32, scheme))
        assert math.isclose(found, expected, rel_tol=1e-9)


# --- batches ---

SIZES = (1e-6, 1e-10), (5e-6, 0.4e-10)  # seconds of a call, and of a multiply-accumulate


def _batches() -> Table:
    axes = ms, ks, ns = batches.PRODUCT_AXES
    pair = (
        Grid(axes, [[[8 * m * k * n * s + call for n in ns] for k in ks] for m in ms])
        for call, s in SIZES
    )
    return Table(dict(zip(("float", "int8"), pair, strict=True)), {"call": (1e-6, 5e-6)})


BATCHES = fixed_tables(products=_batches())


@given(st.integers(0, 100), *(st.sampled_from(points) for points in batches.PRODUCT_AXES))
def test_a_batch_takes_a_call_and_the_time_of_its_matrices(
    batch: int, m: int, k: int, n: int
) -> None:
    found = BATCHES.estimate(Work("products", m, k, n, torch.float32, batch))
    assert math.isclose(found.float_s, 1e-6 + batch * m * k * n * 1e-10, rel_tol=1e-9)
    assert math.isclose(found.int8_s, 5e-6 + batch * m * k * n * 0.4e-10, rel_tol=1e-9)


@given(
    st.sampled_from(["products", "attentions", "decodes"]), *(st.integers(0, 5000) for _ in "bmkn")
)
def test_estimates_of_batches_are_positive_and_finite(
    kind: str, batch: int, m: int, k: int, n: int
) -> None:
    found = BATCHES.estimate(Work(kind, m, k, n, torch.float32, batch))
    assert 0 < found.float_s < math.inf and 0 < found.int8_s < math.inf


# --- grids ---

POINTS = st.lists(st.integers(1, 5000), min_size=2, max_size=4, unique=True).map(sorted)


@given(st.lists(POINTS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_a_grid_of_any_axes_returns_its_points(axes: list[list[int]], draw: object) -> None:
    """Whatever the times: each lies between its neighbours' corners, and at a point on it."""
    random = draw.uniform  # type: ignore[attr-defined]

    def times(axes: list[list[int]]) -> object:
        return [times(axes[1:]) for _ in axes[0]] if axes else random(1e-6, 1e-3)

    grid = Grid(axes, times(axes))  # type: ignore[arg-type]
    for indices in itertools.product(*(range(len(points)) for points in axes)):
        seconds = grid.at(indices)
        at = [points[i] for points, i in zip(axes, indices, strict=True)]
        assert math.isclose(grid.logs(*at), seconds, rel_tol=1e-9)
        assert math.isclose(grid.linear(*at), max(seconds, grid.smallest), rel_tol=1e-9)


@pytest.mark.parametrize(
    ("axes", "seconds", "message"),
    [
        (((1,),), [1.0], r"axis \(1,\) is no list of two or more ascending"),
        (((2, 1),), [1.0, 1.0], "ascending"),
        (((0, 1),), [1.0, 1.0], "ascending"),
        (((1, 2.0),), [1.0, 1.0], "ascending"),
        (((1, 2),), [1.0], "no list of 2"),
        (((1, 2),), [1.0, [1.0]], "a table holds"),
        (((1, 2), (1, 2)), [1.0, 2.0], "no list of 2"),
    ],
)
def test_what_is_no_grid(axes: Axes, seconds: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(axes, seconds)


# --- measuring ---


@pytest.mark.real_cost
def test_on_one_thread_waiting_does_not_count() -> None:
    with on_threads(1):
        (waited,) = fastest(lambda: time.sleep(0.02), rounds=2)
    with on_threads(2):
        (on_the_wall,) = fastest(lambda: time.sleep(0.02), rounds=2)
    assert waited < 0.01 < 0.02 <= on_the_wall


@pytest.mark.real_cost
def test_inference_mode_does_not_change_what_is_measured() -> None:
    with torch.inference_mode(), grid_timing.undisturbed():
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()


@pytest.mark.real_cost
def test_a_pass_is_what_a_call_takes_more_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """From times that are affine in the width of a row; never less than nothing."""
    monkeypatch.setattr(corrections, "fastest", lambda *calls: [call() for call in calls])
    seconds = lambda a, b: lambda x: 5e-6 + len(x) * (a + b * x.shape[1])  # noqa: E731
    found = corrections.more(seconds(3e-8, 2e-10), seconds(1e-8, 5e-11), torch.float32)
    assert found == pytest.approx([2e-8, 1.5e-10], rel=1e-6)
    assert corrections.more(seconds(0, 0), seconds(1e-8, 1e-10), torch.float32) == [0, 0]


@pytest.mark.parametrize("parts", [(2e-10, 4e-11, 1.5e-11), (3e-10, 0.0, 2e-11), (0.0, 0.0, 0.0)])
def test_the_parts_of_a_depthwise_convolution(parts: tuple[float, float, float]) -> None:
    """Three measurements give the seconds per input, per output and per tap; noise makes none of
    them negative."""
    each, output, tap = parts
    seconds = [each + output + 3 * tap, each + output + 14 * tap, each + (output + 3 * tap) / 4]
    assert corrections._parts(seconds, 3, 14) == pytest.approx([each, output, tap], abs=1e-20)
    assert min(corrections._parts(sorted(seconds, reverse=True), 3, 14)) >= 0


# --- weights of a measurement ---


@pytest.mark.parametrize(("n", "k", "matrices"), [(64, 64, 128), (1024, 1024, 16), (4096, 4097, 1)])
def test_weights_come_from_where_those_of_a_model_do(n: int, k: int, matrices: int) -> None:
    """Another one at each use, FAR bytes of them if they are large; and nothing is kept of it."""
    with grid_timing.undisturbed():
        each = grid_timing.weights(n, k, torch.float32)
        assert [w.shape for w in each] == [(n, k)] * matrices
        assert len({w.data_ptr() for w in each}) == matrices
        assert all(w.isfinite().all() for w in each)
    assert grid_timing._room.cache_info().currsize == 0


@given(st.integers(0, 300), st.sampled_from(["int8", "groups", "weight_only"]))
def test_each_copy_is_the_packed_weight(n: int, form: str) -> None:
    scheme = {"int8": ASYMMETRIC, "groups": GROUPS, "weight_only": WEIGHT_ONLY}[form]
    codes = pack(torch.ones(n, 65), (), Packing(scheme.w)).weight
    with grid_timing.undisturbed():
        each = grid_timing.apart(codes)
        assert len({c.data_ptr() for c in each}) == len(each) == grid_timing.MATRICES
        assert all(torch.equal(c, codes) for c in (each[0], each[-1]))
