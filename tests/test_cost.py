"""The cost model: kept on disk, read back, robust, and sane between its measured points."""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qfx
from qfx import batch_cost, cost, form_cost, grid, pass_cost
from qfx.cost import AXES, BLOCK
from qfx.ops.weight import PANEL
from qfx.pass_cost import Pass
from qfx.timing import fastest
from tests.conftest import FIXED_COST, FIXED_FORM_COST, on_threads

ASYMMETRIC = qfx.Scheme(x=qfx.QSpec(symmetric=False))
ZERO_POINTS = qfx.Scheme(w=qfx.QSpec(symmetric=False))  # of weights, without groups


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "measure", lambda dtype: FIXED_COST)
    cost.table.cache_clear()
    return tmp_path / "qfx"


@pytest.mark.real_cost
def test_measured_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cost.table(torch.float32, 1, "ref")
    monkeypatch.setattr(cost, "measure", lambda dtype: pytest.fail("measured again"))
    cost.table.cache_clear()
    assert cost.table(torch.float32, 1, "ref") == first == FIXED_COST
    assert len(list(folder.iterdir())) == 1


@pytest.mark.real_cost
@pytest.mark.parametrize("text", ["", "{", "[]", '{"float_s": [[[1.0]]], "int8_s": []}', "null"])
def test_a_damaged_file_is_measured_anew(folder: Path, text: str) -> None:
    cost.table(torch.float32, 1, "ref")
    (path,) = folder.iterdir()
    path.write_text(text)
    cost.table.cache_clear()
    assert cost.table(torch.float32, 1, "ref") == FIXED_COST
    assert path.read_text() != text


@pytest.mark.real_cost
@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_kept_time_that_is_none_is_measured_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    cost.table(torch.float32, 1, "ref")
    (path,) = folder.iterdir()
    raw = json.loads(path.read_text())
    raw["float_s"][0][0][0] = seconds
    path.write_text(json.dumps(raw))
    measured = replace(FIXED_COST, pack_s=1.0)
    monkeypatch.setattr(cost, "measure", lambda dtype: measured)
    cost.table.cache_clear()
    assert cost.table(torch.float32, 1, "ref") == measured


@pytest.mark.real_cost
def test_an_unwritable_folder_is_no_error(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    assert cost.table(torch.float32, 1, "ref") == FIXED_COST


@pytest.mark.real_cost
def test_tables_of_other_types_threads_and_instruction_sets_are_apart(folder: Path) -> None:
    for key in ((torch.float32, 1, "ref"), (torch.bfloat16, 1, "ref"), (torch.float32, 2, "ref")):
        cost.table(*key)
    cost.table(torch.float32, 1, "avx2")
    assert len(list(folder.iterdir())) == 4


@given(st.integers(0, 5000), st.integers(0, 20000), st.integers(0, 20000))
def test_estimates_are_positive_and_finite(m: int, k: int, n: int) -> None:
    estimate = FIXED_COST.estimate(m, k, n, torch.float32, ASYMMETRIC)
    assert 0 < estimate.float_s < math.inf and 0 < estimate.int8_s < math.inf


@given(*(st.integers(0, len(points) - 1) for points in cost.AXES))
def test_measured_points_are_returned_as_measured(i: int, j: int, k: int) -> None:
    shape = (cost.AXES[0][i], cost.AXES[1][j], cost.AXES[2][k])
    estimate = FIXED_COST.estimate(*shape, torch.float32, ASYMMETRIC)
    assert math.isclose(estimate.float_s, FIXED_COST.float_s[i][j][k], rel_tol=1e-9)
    whole = cost.AXES[2].index(max(shape[2], PANEL))  # int8 works on whole panels
    assert math.isclose(estimate.int8_s, FIXED_COST.int8_s[i][j][whole], rel_tol=1e-9)


def test_beyond_the_grid_time_grows_with_the_work() -> None:
    near = FIXED_COST.estimate(256, 2048, 2048, torch.float32, ASYMMETRIC)
    far = FIXED_COST.estimate(512, 8192, 4096, torch.float32, ASYMMETRIC)
    assert math.isclose(far.float_s / near.float_s, 2 * 4 * 2, rel_tol=0.01)


def test_a_symmetric_scheme_saves_the_zero_point() -> None:
    priced = replace(FIXED_COST, symmetric_saving=1e-7)
    cheap, dear = (
        priced.estimate(256, 1024, 1024, torch.float32, s) for s in (qfx.Scheme(), ASYMMETRIC)
    )
    assert math.isclose(dear.int8_s - cheap.int8_s, 256 * 1e-7, rel_tol=1e-6)


def test_uneven_sizes_cost_what_was_measured() -> None:
    """Float columns beyond a whole block count for more, from the M on where they were found to;
    int8 rows with features beyond a whole vector take longer."""
    dear = tuple(float(BLOCK if i else 0) for i in range(BLOCK))
    plain, *_ = FIXED_COST.columns
    uneven = replace(FIXED_COST, columns=(plain, *[dear] * (len(AXES[0]) - 1)), uneven_s=1e-7)
    for m, n, like in ((1, 65, 65), (2, 65, 80), (300, 65, 80), (300, 64, 64)):
        found = uneven.estimate(m, 128, n, torch.float32, ASYMMETRIC).float_s
        expected = FIXED_COST.estimate(m, 128, like, torch.float32, ASYMMETRIC).float_s
        assert math.isclose(found, expected, rel_tol=1e-9)
    for n, like in ((64, 64), (65, 96), (96, 96)):  # int8 works on whole panels of 32
        a, b = (FIXED_COST.estimate(300, 128, c, torch.float32, ASYMMETRIC) for c in (n, like))
        assert a.int8_s == b.int8_s
    for k, more in ((64, 0.0), (65, 1e-7)):
        a, b = (t.estimate(300, k, 64, torch.float32, ASYMMETRIC) for t in (uneven, FIXED_COST))
        assert math.isclose(a.int8_s - b.int8_s, 300 * more, rel_tol=1e-6)


def test_the_lesser_time_of_two_sweeps_counts_and_large_cells_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    axes, calls = ((1, 4, 16), (8, 16), (8, 32)), itertools.count()
    monkeypatch.setattr(grid, "LARGEST", 4 * 16 * 32)

    def column(k: int, n: int) -> grid.Column:
        disturbed = 1024 * (next(calls) < 2)  # half of the first sweep

        def timed(m: int) -> tuple[float, float]:
            assert m * k * n <= grid.LARGEST
            return m * k * n + disturbed, 1 + 2 * m * k * n + disturbed

        return timed

    float_s, int8_s = grid.measured_grids(axes, column)
    for (i, m), (j, k), (h, n) in itertools.product(*map(enumerate, axes)):
        assert (float_s[i][j][h], int8_s[i][j][h]) == (m * k * n, 1 + 2 * m * k * n)


@pytest.mark.real_cost
def test_on_one_thread_waiting_does_not_count() -> None:
    with on_threads(1):
        (waited,) = fastest(lambda: time.sleep(0.02), rounds=2)
    with on_threads(2):
        (on_the_wall,) = fastest(lambda: time.sleep(0.02), rounds=2)
    assert waited < 0.01 < 0.02 <= on_the_wall


@pytest.mark.real_cost
def test_inference_mode_does_not_change_what_is_measured() -> None:
    with torch.inference_mode(), grid.undisturbed():
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()


@pytest.mark.real_cost
def test_a_real_measurement_has_the_right_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "AXES", ((1, 4), (32, 64), (8, 16)))
    state = torch.random.get_rng_state()
    measured = cost.measure(torch.float32)
    assert torch.tensor(measured.float_s).shape == torch.tensor(measured.int8_s).shape == (2, 2, 2)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.real_cost
def test_measuring_is_out_of_the_callers_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(cost, "AXES", ((1, 4), (8, 16), (8, 16)))
    for module in (cost, pass_cost):
        monkeypatch.setattr(
            module, "fastest", lambda *calls, **_: seen.append(_autocast()) or [1.0] * len(calls)
        )
    with torch.autocast("cpu", torch.bfloat16):
        cost.measure(torch.float32)
    assert seen and not any(seen)


# --- forms that are no single int8 GEMM, and rotation ---


ROTATION, TURN = FIXED_COST.rotation, FIXED_COST.turn


def test_rotation_costs_its_rows_and_elements_where_a_block_fits() -> None:
    plain, rotated = qfx.Scheme(), qfx.Scheme(rotation=64)
    for k, added in ((1024, 256 * (1e-9 + 1024 * 1e-10)), (1023, 0.0)):
        first, second = (
            FIXED_COST.estimate(256, k, 512, torch.float32, s).int8_s for s in (plain, rotated)
        )
        assert math.isclose(second - first, added, rel_tol=1e-6)


@pytest.mark.parametrize("scheme", [ASYMMETRIC, *form_cost.FORMS.values()], ids=str)
def test_outliers_are_a_float_linear_beside_the_others(scheme: qfx.Scheme) -> None:
    problem = (64, 512, 256, torch.float32, scheme)
    plain, split = (cost.MachineCost().estimate(*problem, outliers=count) for count in (0, 8))
    beside = FIXED_COST.estimate(64, 8, 256, torch.float32, ASYMMETRIC).float_s
    assert split.float_s == plain.float_s
    assert math.isclose(split.int8_s - plain.int8_s, beside, rel_tol=1e-6)


@pytest.mark.parametrize("scheme", [*form_cost.FORMS.values(), ZERO_POINTS], ids=str)
def test_forms_have_tables_of_their_own(scheme: qfx.Scheme) -> None:
    problem = (64, 512, 256, torch.float32)
    found = cost.MachineCost().estimate(*problem, scheme)
    assert found == FIXED_FORM_COST.estimate(*problem[:3])
    rotated = cost.MachineCost().estimate(*problem, replace(scheme, rotation=64))
    turned = TURN if scheme.x is None else ROTATION  # nothing else passes over float activations
    assert math.isclose(rotated.int8_s - found.int8_s, turned.over(64, 512), rel_tol=1e-6)


def test_training_turns_the_weight_and_both_gradients() -> None:
    m, k, n = 256, 1024, 512
    plain = n * k * (FIXED_COST.pack_s + FIXED_COST.again_s) + m * k * FIXED_COST.codes_s
    turned = ROTATION.over(n, k) + 2 * TURN.over(n, k) + TURN.over(m, k)
    for scheme, expected in (
        (ASYMMETRIC, plain),
        (replace(ASYMMETRIC, rotation=64), plain + turned),
    ):
        found = cost.MachineCost().training(m, k, n, torch.float32, scheme)
        assert math.isclose(found, expected, rel_tol=1e-9)


def test_a_static_scale_saves_a_look_at_every_element_and_costs_a_call() -> None:
    priced = replace(FIXED_COST, static_saving=Pass(1e-8, 2e-11), static_call_s=4e-6)
    static = qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR, static=True))
    for m, saved in ((1, -4e-6 + 1e-8 + 1024 * 2e-11), (256, -4e-6 + 256 * (1e-8 + 1024 * 2e-11))):
        dear, cheap = (
            priced.estimate(m, 1024, 1024, torch.float32, s).int8_s for s in (ASYMMETRIC, static)
        )
        assert math.isclose(dear - cheap, saved, rel_tol=1e-6)


@pytest.mark.real_cost
def test_a_pass_is_what_a_call_takes_more_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """From times that are affine in the width of a row; never less than nothing."""
    monkeypatch.setattr(pass_cost, "fastest", lambda *calls: [call() for call in calls])
    seconds = lambda a, b: lambda x: 5e-6 + len(x) * (a + b * x.shape[1])  # noqa: E731
    found = pass_cost.measured_pass(seconds(3e-8, 2e-10), torch.float32, less=seconds(1e-8, 5e-11))
    assert found == pytest.approx((2e-8, 1.5e-10), rel=1e-6)
    assert pass_cost.measured_pass(seconds(0, 0), torch.float32, less=seconds(1e-8, 1e-10)) == (
        0,
        0,
    )


@pytest.mark.real_cost
@pytest.mark.parametrize("name", form_cost.FORMS)
def test_a_form_is_measured_when_asked_for_and_kept(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_cost, "AXES", ((1, 4), (64, 128), (8, 16)))
    form_cost.form_table.cache_clear()
    measured = form_cost.form_table(name, torch.float32, 1, "ref")
    assert torch.tensor(measured.float_s).shape == torch.tensor(measured.int8_s).shape == (2, 2, 2)
    monkeypatch.setattr(form_cost, "measure_form", lambda *what: pytest.fail("measured again"))
    form_cost.form_table.cache_clear()
    assert form_cost.form_table(name, torch.float32, 1, "ref") == measured
    form_cost.form_table.cache_clear()
    assert len(list(folder.iterdir())) == 1


# --- batched products ---

BMM = batch_cost.BatchTable(
    batch_cost.BMM_AXES,
    *(
        tuple(tuple(tuple(8 * m * k * n * s + call for n in ns) for k in ks) for m in ms)
        for ms, ks, ns in [batch_cost.BMM_AXES]
        for s, call in ((1e-10, 1e-6), (0.4e-10, 5e-6))
    ),
    1e-6,
    5e-6,
)


@pytest.mark.real_cost
def test_batched_products_are_measured_when_asked_for_and_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_cost, "measure_bmm", lambda dtype: BMM)
    batch_cost.bmm_table.cache_clear()
    cost.table(torch.float32, 1, "ref")
    assert len(list(folder.iterdir())) == 1
    assert batch_cost.bmm_table(torch.float32, 1, "ref") == BMM
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(batch_cost, "measure_bmm", lambda dtype: pytest.fail("measured again"))
    batch_cost.bmm_table.cache_clear()
    assert batch_cost.bmm_table(torch.float32, 1, "ref") == BMM
    batch_cost.bmm_table.cache_clear()


@given(st.integers(0, 100), *(st.sampled_from(points) for points in batch_cost.BMM_AXES))
def test_a_batch_takes_a_call_and_the_time_of_its_matrices(
    batch: int, m: int, k: int, n: int
) -> None:
    estimate = BMM.estimate(batch, m, k, n)
    assert math.isclose(estimate.float_s, 1e-6 + batch * m * k * n * 1e-10, rel_tol=1e-9)
    assert math.isclose(estimate.int8_s, 5e-6 + batch * m * k * n * 0.4e-10, rel_tol=1e-9)


@given(*(st.integers(0, 5000) for _ in range(4)))
def test_estimates_of_batches_are_positive_and_finite(batch: int, m: int, k: int, n: int) -> None:
    estimate = BMM.estimate(batch, m, k, n)
    assert 0 < estimate.float_s < math.inf and 0 < estimate.int8_s < math.inf


@pytest.mark.real_cost
def test_a_real_measurement_of_batches_has_the_right_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_cost, "BMM_AXES", ((1, 4), (16, 32), (8, 16)))
    measured = batch_cost.measure_bmm(torch.float32)
    assert torch.tensor(measured.float_s).shape == torch.tensor(measured.int8_s).shape == (2, 2, 2)
    assert measured.float_call_s > 0 and measured.int8_call_s > 0


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu")
