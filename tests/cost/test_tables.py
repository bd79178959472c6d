"""Tables on disk: only times are read, from files that nobody else can have written, and not too
many of them stay."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qfx.cost import batched, machine, tables, weight_storage
from qfx.cost.gpu import GpuTable
from tests.conftest import FIXED_BMM_COST, FIXED_COST, FIXED_STORAGE_COST
from tests.cost.test_gpu_plan import raw_table
from tests.lib.mutations import mutated

MACHINE = (torch.float32, 1, "ref")
READERS: dict[str, tuple[Callable[[str], Any], Any, tuple[Any, ...]]] = {
    "cost": (machine._from_json, asdict(FIXED_COST), ("float_s", 1, 2, 3)),
    "columns": (machine._from_json, asdict(FIXED_COST), ("columns", 1, 2)),
    "pass": (machine._from_json, asdict(FIXED_COST), ("rotation", 1)),
    "form": (weight_storage._from_json, asdict(FIXED_STORAGE_COST), ("int8_s", 1, 2, 1)),
    "batch": (
        partial(batched._from_json, axes=batched.BMM_AXES),
        asdict(FIXED_BMM_COST),
        ("float_s", 1, 2, 3),
    ),
    "call": (
        partial(batched._from_json, axes=batched.BMM_AXES),
        asdict(FIXED_BMM_COST),
        ("int8_call_s",),
    ),
    "gpu": (GpuTable.read, raw_table(), ("seconds", "bfloat16", "int8", 1, 2, 3)),
    "gpu training": (GpuTable.read, raw_table(), ("training", "bfloat16", 1)),
}
NO_TIMES = [math.nan, math.inf, -1.0, 1e300, True, "1.0", None, 10**400, [], {}]


@pytest.mark.parametrize("kind", READERS)
def test_a_number_that_is_no_time_is_refused(kind: str) -> None:
    read, whole, (*path, last) = READERS[kind]
    read(json.dumps(whole))
    for value in NO_TIMES:
        changed = inner = json.loads(json.dumps(whole))
        for part in path:
            inner = inner[part]
        inner[last] = value
        with pytest.raises(ValueError, match=r"a table holds|no list of"):
            read(json.dumps(changed))


def test_any_change_of_a_table_gives_times_or_is_refused() -> None:
    """Of a table with one row of each kind of number."""
    whole = asdict(FIXED_COST)
    small = {name: value for name, value in whole.items() if name not in ("columns", "int8_s")}
    count = 0
    for text in mutated(json.dumps(small | {"float_s": [[[1.0]]]})):
        try:
            found = json.loads(text)
            read = machine._from_json(json.dumps({**whole, **found, "float_s": whole["float_s"]}))
        except (ValueError, TypeError, RecursionError):
            continue
        count += 1
        numbers = [
            read.uneven_s, read.symmetric_saving, *read.static_saving, read.static_call_s,
            read.pack_s, read.again_s, read.codes_s, *read.rotation, *read.turn,
        ]  # fmt: skip
        assert all(type(n) is float and abs(n) <= tables.LONGEST for n in numbers)
    assert count > 50


# --- the folder ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tables._none.cache_clear()
    return tmp_path / "cache" / "qfx"


def ask(kind: str = "cost", measured: Any = FIXED_STORAGE_COST) -> tuple[Any, bool]:
    """The table, and whether it had to be measured."""
    calls: list[int] = []
    table = tables.kept(
        kind, MACHINE, weight_storage._from_json, lambda: calls.append(1) or measured
    )
    return table, bool(calls)


def test_the_folder_and_its_files_are_the_users_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert ask() == (FIXED_STORAGE_COST, True) and ask() == (FIXED_STORAGE_COST, False)
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


def _writable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o620)


def _link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _pipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("happens", [_owned_by_another, _writable, _link, _pipe])
def test_what_another_user_could_have_written_is_not_read(
    happens: Callable[..., None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask()
    (path,) = folder.iterdir()
    happens(path, monkeypatch)
    monkeypatch.setattr(tables, "_folder", lambda: folder)
    assert ask()[1]


def test_a_link_is_not_written_through(folder: Path, tmp_path: Path) -> None:
    """The name of a table and that of a partial one may be known to others."""
    folder.mkdir(parents=True, mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("of the user")
    path = folder / tables._name("cost", *MACHINE)
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
    assert said.startswith("the cost model is measured in each process, and not kept: ")
    assert not folder.is_dir() or not list(folder.iterdir())


def test_what_was_not_of_use_for_longest_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST", 3)
    for age, kind in enumerate(("old", "older", "oldest")):
        ask(kind)
        path = folder / tables._name(kind, *MACHINE)
        os.utime(path, (10**9 - age, 10**9 - age))
    folder.joinpath(".0123456789abcdef.partial").write_text("of a process that died")
    os.utime(folder / ".0123456789abcdef.partial", (1, 1))
    folder.joinpath("notes.txt").write_text("not ours")
    folder.joinpath("cost9-folder").mkdir()
    assert not ask("oldest")[1]  # is of use
    ask("new")
    kinds = {path.name.partition(str(tables.FORMAT))[0] for path in folder.glob("*.json")}
    assert kinds == {"oldest", "new", "old"}
    others = {path.name for path in folder.iterdir() if path.suffix != ".json"}
    assert others == {"notes.txt", "cost9-folder"}
