"""Tables on disk: only times are read, from files that nobody else can have written, and not too
many of them stay."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qfx.cost import disk
from qfx.cost.gpu import GpuCost
from qfx.cost.grid import LONGEST
from qfx.cost.table import NEAR, Table
from qfx.cost.workloads import KINDS
from qfx.io import disk_memo
from tests.cost.test_gpu_plan import raw_table
from tests.lib.costs import FIXED
from tests.lib.mutations import mutated

MACHINE = (torch.float32, 1, "ref")
KEPT = FIXED["groups"]
READERS = {name: kind.read for name, kind in KINDS.items()} | {"gpu": GpuCost.read}
PLACES: dict[str, tuple[str, tuple[Any, ...]]] = {  # of a number: in the table of which kind, where
    "grid": ("int8", ("grids", "float", "seconds", 1, 2, 3)),
    "columns": ("int8", ("numbers", "columns", 18)),
    "pass": ("int8", ("numbers", "rotation", 1)),
    "difference": ("int8", ("numbers", "static_call", 0)),
    "form": ("groups", ("grids", "int8", "seconds", 1, 2, 1)),
    "batch": ("products", ("grids", "float", "seconds", 1, 2, 3)),
    "call": ("decodes", ("numbers", "call", 1)),
    "gpu": ("gpu", ("tables", "bfloat16", "grids", "int8", "seconds", 1, 2, 3)),
    "gpu training": ("gpu", ("tables", "bfloat16", "numbers", "training", 1)),
}
NO_TIMES = [math.nan, math.inf, -1e4, 1e300, True, "1.0", None, 10**400, [], {}]


def _whole(kind: str) -> Any:
    return raw_table() if kind == "gpu" else json.loads(FIXED[kind].text())


@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_is_no_time_is_refused(place: str) -> None:
    kind, (*path, last) = PLACES[place]
    read, whole = READERS[kind], _whole(kind)
    read(json.dumps(whole))
    for value in NO_TIMES if place == "difference" else [*NO_TIMES, -1.0]:
        changed = inner = json.loads(json.dumps(whole))
        for part in path:
            inner = inner[part]
        inner[last] = value
        with pytest.raises(ValueError, match=r"a table holds|no list of"):
            read(json.dumps(changed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_another_kind_or_of_other_sizes_is_refused(kind: str) -> None:
    """Nor is one that lacks a grid, or has another."""
    whole = _whole(kind)
    changed = [json.loads(json.dumps(whole)) for _ in range(3)]
    changed[0]["grids"]["int8"]["axes"][0][-1] += 1
    del changed[1]["grids"]["float"]
    changed[2]["grids"]["double"] = whole["grids"]["float"]
    for raw in changed:
        with pytest.raises(ValueError, match="of other sizes"):
            KINDS[kind].read(json.dumps(raw))


def test_any_change_of_a_table_gives_times_or_is_refused() -> None:
    """Of a table with one grid of two points an axis, and one number of each kind."""
    whole, axes = _whole("int8"), ((1, 2), (32, 64), (32, 64))
    small = replace(KINDS["int8"], axes=axes)
    for grid in whole["grids"].values():
        grid.update(axes=axes, seconds=[[[1.0, 2.0]] * 2] * 2)
    columns = whole["numbers"].pop("columns")
    count = 0
    for text in mutated(json.dumps(whole)):
        try:
            found = json.loads(text)
            found["numbers"]["columns"] = columns
            read = small.read(json.dumps(found))
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        count += 1
        numbers = [*itertools.chain(*read.numbers.values())]
        assert all(type(n) is float and abs(n) <= LONGEST for n in numbers)
        assert all(0 < g.linear(3, 48, 99) < math.inf for g in read.grids.values())
    assert count > 50


# --- the folder ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    disk_memo._warn.cache_clear()
    return tmp_path / "cache" / "qfx"


def ask(kind: str = "cost") -> tuple[Table, bool]:
    """The table, and whether it had to be measured."""
    calls: list[int] = []
    table = disk.read_or_measure(
        kind, MACHINE, KINDS["groups"].read, lambda: calls.append(1) or KEPT
    )
    return table, bool(calls)


def test_a_table_whose_sweeps_were_apart_is_measured_again(folder: Path) -> None:
    """By the next processes, so many times in all; the best one stays."""
    spreads = [NEAR * times for times in (3, 2, 4, 0)]
    left, calls = iter(spreads), []
    for _ in range(disk.TRIES + 2):
        found = disk.read_or_measure(
            "cost",
            MACHINE,
            KINDS["groups"].read,
            lambda: calls.append(1) or replace(KEPT, spread=next(left)),
        )
    assert len(calls) == disk.TRIES and found.spread == 2 * NEAR
    near, read = replace(KEPT, spread=NEAR), KINDS["groups"].read
    for _ in range(2):
        found = disk.read_or_measure("other", MACHINE, read, lambda: calls.append(1) or near)
    assert len(calls) == disk.TRIES + 1 and found == near


def test_the_folder_and_its_files_are_the_users_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert ask() == (KEPT, True) and ask() == (KEPT, False)
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_could_write_to_is_closed_to_them(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    ask()
    assert folder.stat().st_mode & 0o777 == 0o700


def _owned_by_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def _writable(path: Path) -> None:
    path.chmod(0o620)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("happens", [_writable, _link, _pipe])
def test_what_another_user_could_have_written_is_not_read(
    happens: Callable[..., None], folder: Path
) -> None:
    ask()
    (path,) = folder.iterdir()
    happens(path)
    assert ask() == (KEPT, True) and ask() == (KEPT, False)


def test_a_link_is_not_written_through(folder: Path, tmp_path: Path) -> None:
    """The name of a table and that of a partial one may be known to others."""
    folder.mkdir(parents=True, mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("of the user")
    path = folder / disk._name("cost", *MACHINE)
    path.symlink_to(victim)
    ask()
    assert victim.read_text() == "of the user" and not path.is_symlink()


@pytest.mark.parametrize("which", ["no home", "another owner", "a file"])
def test_without_a_folder_nothing_is_kept_and_the_log_says_so_once(
    which: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if which == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    elif which == "another owner":
        folder.mkdir(parents=True)
        _owned_by_another(folder, monkeypatch)
    else:
        folder.parent.mkdir()
        folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "qfx"):
        assert [ask()[1] for _ in range(3)] == [True] * 3
    (said,) = caplog.messages
    assert said.startswith("the cost tables are not kept on disk: ")
    assert not folder.is_dir() or not list(folder.iterdir())


def test_it_is_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFX_COST_CACHE", "0")
    assert [ask()[1] for _ in range(2)] == [True] * 2 and not folder.exists()


def test_what_was_not_of_use_for_longest_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of earlier formats too."""
    monkeypatch.setattr(disk, "TABLES", replace(disk.TABLES, most=3))
    for age, kind in enumerate(("old", "older", "oldest")):
        ask(kind)
        path = folder / disk._name(kind, *MACHINE)
        os.utime(path, (10**9 - age, 10**9 - age))
    for name in ("notes.txt", "my-notes.json", "cost11-of-an-earlier-version.json"):
        folder.joinpath(name).write_text("")
        os.utime(folder / name, (1, 1))
    assert not ask("oldest")[1]  # is of use
    ask("new")
    names = {path.name for path in folder.iterdir()}
    assert names == {"notes.txt", "my-notes.json"} | {
        disk._name(kind, *MACHINE) for kind in ("oldest", "new", "old")
    }
