"""Live tables: cells are measured when a decision asks for them, once, while there is time."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import qfx
from qfx.cost import corrections, disk, linears, live_table, table_file
from qfx.cost.default_tables import FOLDER, NEAREST, default_table, family_of
from qfx.cost.device_models import costs_from
from qfx.cost.grid import Axes
from qfx.cost.live_table import DOUBTFUL, TRIES, CellTimes, Known, LiveTable, Unmeasured
from qfx.cost.machine import MachineCost
from qfx.cost.model import Costs, Work
from qfx.cost.spending import SECONDS, Spending, unlimited
from qfx.cost.table import NEAR, Table
from qfx.cost.table_file import TableFile, read_known, text_of
from qfx.cost.workloads import KINDS, Workload
from tests.conftest import on_threads
from tests.lib.costs import FIXED, known
from tests.lib.mutations import mutated

AXES: Axes = ((1, 4, 16, 64), (8, 16, 32), (8, 32, 64))
F32 = torch.float32
SIZES = st.tuples(st.integers(1, 100), st.integers(1, 50), st.integers(1, 100))


class Timed:
    """A workload whose times are known. `calls`: the cells that were timed, in order."""

    def __init__(self, *noise: float) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._noise = itertools.cycle(noise or (1.0,))
        extras = {"rotation": corrections.CORRECTIONS["rotation"]._replace(measured=self._pass)}
        self.workload = replace(KINDS["groups"], axes=AXES, column=self._column, extras=extras)

    def _column(self, k: int, n: int, dtype: torch.dtype) -> Callable[[int], tuple[float, float]]:
        def timed(m: int) -> tuple[float, float]:
            self.calls.append((m, k, n))
            noise = next(self._noise)
            return (1e-6 + m * k * n * 1e-10) * noise, (5e-6 + m * k * n * 4e-11) * noise

        return timed

    def _pass(self, dtype: torch.dtype) -> list[float]:
        self.calls.append((0, 0, 0))
        return [1e-9, 1e-10]

    def table(self, known: Known | None = None, seconds: float = 1e9) -> LiveTable:
        return LiveTable(self.workload, F32, known, Spending(seconds))


WHOLE = Timed().table().whole()


@given(SIZES)
def test_only_the_cells_around_a_size_are_measured_and_each_twice(size: tuple[int, ...]) -> None:
    timed = Timed()
    table, near = timed.table(), [_neighbours(points, at) for points, at in zip(AXES, size)]  # noqa: B905
    found = [table.grids[name].linear(*size) for name in ("float", "int8")]
    expected = [WHOLE.grids[name].linear(*size) for name in ("float", "int8")]
    assert found == pytest.approx(expected, rel=1e-12)
    wanted = {*itertools.product(*near), (1, 8, 8)}
    assert {*timed.calls} <= wanted and all(timed.calls.count(c) == 2 for c in timed.calls)
    count = len(timed.calls)
    assert [table.grids[name].linear(*size) for name in ("float", "int8")] == found
    assert len(timed.calls) == count


def _neighbours(points: tuple[int, ...], at: int) -> tuple[int, ...]:
    i = min(max(sum(p <= at for p in points) - 1, 0), len(points) - 2)
    return points[i : i + 2]


@given(SIZES, SIZES)
def test_a_later_process_measures_what_is_missing(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    first, second = Timed(), Timed()
    table = first.table()
    table.grids["int8"].linear(*a)
    later = second.table(read_known(second.workload, text_of(table.known)))
    assert later.grids["int8"].linear(*a) == table.grids["int8"].linear(*a)
    assert not second.calls and not later.changed
    later.grids["int8"].linear(*b)
    assert not {*first.calls} & {*second.calls}


def test_large_products_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their times follow from those of fewer rows, which are linear here."""
    monkeypatch.setattr(live_table, "LARGEST", 4 * 16 * 32)
    timed = Timed()
    whole = timed.table().whole()
    assert all(m <= 4 or m * k * n <= 4 * 16 * 32 for m, k, n in timed.calls)
    for name, point in itertools.product(WHOLE.grids, itertools.product(*map(range, (4, 3, 3)))):
        assert math.isclose(whole.grids[name].at(point), WHOLE.grids[name].at(point))


def test_a_cell_whose_times_were_apart_is_measured_again_by_later_processes() -> None:
    """TRIES times in all, once a process; the least times stay."""
    kept, counts = Known(), []
    for noise in (4.0, 2.0, 3.0, 1.0):
        timed = Timed(noise, noise * (1 + 2 * NEAR))
        table = timed.table(kept)
        for _ in range(2):
            table.grids["float"].at((0, 0, 0)) if kept.cells else None
            table.measure([(0, 0, 0)])
        counts.append(len(timed.calls))
        kept = read_known(timed.workload, text_of(table.known))
    assert counts == [2] * TRIES + [0]
    assert math.isclose(kept.cells[1, 8, 8].float_s, 2 * (1e-6 + 64e-10))


def test_times_that_are_far_apart_decide_nothing_until_they_are_measured_again() -> None:
    timed = Timed(1.0, 2.5 + DOUBTFUL)
    table = timed.table()
    for _ in range(2):
        with pytest.raises(Unmeasured):
            table.grids["int8"].linear(1, 8, 8)
    assert len(timed.calls) == 2
    again = Timed()
    later = again.table(read_known(timed.workload, text_of(table.known)))
    assert later.grids["int8"].linear(1, 8, 8) > 0 and len(again.calls) == 2
    with unlimited():
        assert table.grids["int8"].linear(1, 8, 8) > 0


# --- the time for measuring ---


def test_after_its_time_a_table_measures_nothing() -> None:
    timed = Timed()
    table = timed.table(seconds=0.0)
    for _ in range(2):
        with pytest.raises(Unmeasured):
            table.grids["int8"].linear(3, 9, 9)
        with pytest.raises(Unmeasured):
            table.over("rotation", 1, 1)
    assert not timed.calls
    with unlimited():
        assert table.grids["int8"].linear(3, 9, 9) == WHOLE.grids["int8"].linear(3, 9, 9)
    assert table.grids["int8"].linear(3, 9, 9) > 0 and timed.calls


def test_spending_counts_processor_time_of_what_runs_inside() -> None:
    spending = Spending(1e-9)
    assert spending.left
    with spending.counted():
        sum(range(10**5))
        assert not spending.left
    assert 0 < spending.spent == spending.spent


@pytest.mark.parametrize("text", ["", "0", "3.5", "-1", "much", "nan"])
def test_the_environment_says_how_much(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFX_MEASURING_SECONDS", text)
    if text in ("-1", "much", "nan"):
        with pytest.raises(ValueError, match=f"QFX_MEASURING_SECONDS='{text}' is not a number of"):
            _ = Spending().left
    else:
        assert Spending().limit == float(text or SECONDS)


def _spent(kind: str, dtype: torch.dtype, threads: int, isa: str) -> LiveTable:
    return LiveTable(KINDS[kind], dtype, spending=Spending(0.0))


SPENT = MachineCost(_spent)


@pytest.mark.real_cost
def test_a_plan_says_where_it_follows_defaults() -> None:
    """And it is the same plan again."""
    model, x = nn.Sequential(nn.Linear(512, 512), nn.ReLU()).eval(), torch.randn(64, 512)
    family = family_of(qfx.ops.sys.modules["qfx._C"].isa())
    said = []
    for _ in range(2):
        with costs_from(Costs(SPENT)):
            said.append(str(qfx.rewrite(qfx.trace(model, x))[1]))
    assert said[0] == said[1]
    assert f"by defaults of {family}, not measured here" in said[0]


@pytest.mark.real_cost
def test_nothing_is_measured_for_a_plan_that_measures_do_not_decide() -> None:
    def no_table(*machine: Any) -> LiveTable:
        pytest.fail("a table was asked for")

    model, x = nn.Linear(64, 64).eval(), torch.randn(4, 64)
    with costs_from(Costs(MachineCost(no_table))):
        _, plan = qfx.rewrite(qfx.trace(model, x), {"minimum_gain": 0})
        assert "int8 whatever it gains: minimum_gain=0" in str(plan)
        dynamic = torch.compile(
            model, backend="qfx", dynamic=True, options={"minimum_gain": 0, "inner": "eager"}
        )
        dynamic(x)


def test_a_family_without_defaults_is_measured() -> None:
    timed = Timed()
    tables = {"groups": timed.table(seconds=0.0)}
    cost = MachineCost(lambda kind, *_: tables[kind], defaults=lambda *_: None)
    scheme = qfx.Scheme(w=qfx.QSpec(bits=4, group=64))
    assert cost.estimate(Work.linear(4, 16, 8, F32, scheme)).source == "" and timed.calls


# --- defaults ---


# No processor of the family was at hand: each machine measures its own.
WITHOUT_DEFAULTS = {("avxvnni", "attention_steps")}


@pytest.mark.parametrize("isa", sorted(path.stem for path in FOLDER.glob("*.json")))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_family_has_defaults_for_all_kinds_and_types(isa: str, dtype: torch.dtype) -> None:
    for kind, workload in KINDS.items():
        table = default_table(kind, dtype, isa)
        if (isa, kind) in WITHOUT_DEFAULTS:
            assert table is None
            continue
        assert table is not None and table.grids["int8"].axes == workload.axes
    large = default_table("int8", dtype, isa)
    assert large is not None
    float_s, int8_s = (large.grids[name].linear(256, 1024, 2048) for name in ("float", "int8"))
    assert 0.5 < float_s / int8_s < 100
    assert dtype != F32 or float_s / int8_s > 1.5


def test_other_families_follow_the_nearest() -> None:
    assert family_of("ref") is None
    for isa, nearest in NEAREST.items():
        assert family_of(isa) == nearest and default_table("int8", F32, isa) is not None


# --- files ---


@given(
    st.lists(st.tuples(*map(st.sampled_from, AXES)), unique=True),
    st.floats(1e-9, 1e3),
    st.integers(1, TRIES),
    st.booleans(),
)
def test_a_file_gives_back_what_it_was_given(
    sizes: list[Any], seconds: float, tries: int, numbers: bool
) -> None:
    cells = dict.fromkeys(sizes, CellTimes(seconds, seconds / 3, seconds / 7, tries))
    given = Known(cells, {"rotation": (seconds, 0.0)} if numbers else {})
    assert read_known(Timed().workload, text_of(given)) == given


def test_any_change_of_a_file_gives_times_or_is_refused() -> None:
    timed, count = Timed(), 0
    cells = {(1, 8, 8): CellTimes(1.0, 2.0, 0.5, 1), (4, 8, 8): CellTimes(1.0, 2.0)}
    for text in mutated(text_of(Known(cells, {"rotation": (1.0, 2.0)}))):
        try:
            found = read_known(timed.workload, text)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        count += 1
        for sizes, cell in found.cells.items():
            assert all(s in points for s, points in zip(sizes, AXES, strict=True))
            assert 0 < cell.float_s < 1e5 and 0 < cell.int8_s < 1e5 and 1 <= cell.tries <= TRIES
    assert count > 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table_file.table.cache_clear()
    yield tmp_path / "qfx"
    table_file.table.cache_clear()


WORK = Work.linear(3, 60, 60, F32, qfx.Scheme())


@pytest.mark.real_cost
def test_what_an_estimate_measured_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("NEAR", "DOUBTFUL"):  # all times settle, however busy the machine is
        monkeypatch.setattr(live_table, limit, 1e9)
    with unlimited():
        found = MachineCost().estimate(WORK)
    table_file.table.cache_clear()
    for module in (linears, corrections):
        monkeypatch.setattr(module, "fastest", lambda *calls, **_: pytest.fail("measured again"))
    assert MachineCost().estimate(WORK) == found
    (path,) = folder.glob("int8-*")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.real_cost
@pytest.mark.parametrize("text", ["", "1\n{", "null", '{"cells": [[1, 32]], "numbers": {}}'])
def test_a_damaged_file_is_measured_anew(folder: Path, text: str) -> None:
    machine = (F32, torch.get_num_threads(), qfx.ops.sys.modules["qfx._C"].isa())
    cache = disk.TABLES.cache()
    assert cache is not None
    name = TableFile("int8", machine).key()
    cache.write(name, text.encode())
    with unlimited():
        MachineCost().estimate(WORK)
    assert read_known(KINDS["int8"], cache.read(name).decode()).cells


def test_tables_of_other_types_threads_and_instruction_sets_are_apart() -> None:
    machines = [(F32, 1, "ref"), (torch.bfloat16, 1, "ref"), (F32, 2, "ref"), (F32, 1, "avx2")]
    assert len({TableFile("int8", machine).key() for machine in machines}) == 4


# --- real measurements ---


@pytest.mark.real_cost
@pytest.mark.parametrize("name", KINDS)
def test_a_real_measurement_can_be_kept_and_read(name: str) -> None:
    small = replace(KINDS[name], axes=((1, 4), (64, 128), (8, 16)))
    state = torch.random.get_rng_state()
    table = LiveTable(small, F32, spending=Spending(1e9))
    # The thread's own time, however busy the machine is, and times that differ are believed.
    with on_threads(1), unlimited():
        whole = table.whole()
    assert small.read(whole.text()) == whole
    assert read_known(small, text_of(table.known)) == table.known
    assert {*whole.numbers} == {*small.extras}
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.real_cost
def test_measuring_is_out_of_the_callers_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    for module in (linears, corrections):
        monkeypatch.setattr(
            module,
            "fastest",
            lambda *calls, **_: seen.append(torch.is_autocast_enabled("cpu")) or [1.0] * len(calls),
        )
    small = replace(KINDS["int8"], axes=((1, 4), (8, 16), (8, 16)))
    with torch.autocast("cpu", torch.bfloat16):
        LiveTable(small, F32, spending=Spending(1e9)).whole()
    assert seen and not any(seen)


def test_fixed_tables_are_those_of_the_tests() -> None:
    """What conftest keeps for all tests reads like the tables that it was made of."""
    for kind, whole in FIXED.items():
        assert isinstance(whole, Table) and isinstance(KINDS[kind], Workload)
        live = LiveTable(KINDS[kind], F32, known(whole), Spending(0.0))
        size = tuple((a[0] + a[1]) // 2 for a in KINDS[kind].axes)
        for name, grid in whole.grids.items():
            assert math.isclose(live.grids[name].linear(*size), grid.linear(*size))
        json.loads(text_of(live.known))
