"""Values that are kept on disk: what is made, what is read, and what a user hears of it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from qfx.io import disk_memo
from qfx.io.disk_cache import DiskCache
from qfx.io.disk_memo import DiskMemo, NotCached, is_switch

KEY, VALUE = "key.txt", "a value"
KINDS = DiskMemo(
    "kind", "the values", "values", re.compile(r"[a-z]+\.txt"), 3, logging.getLogger("kept")
)


@dataclass
class Text:
    """An entry that is read as text. `wrong`: what its methods raise, by name."""

    wrong: dict[str, Exception] = field(default_factory=dict)
    again: bool = False  # whether another has to be made
    made: int = 0

    def _fail(self, method: str) -> None:
        if method in self.wrong:
            raise self.wrong[method]

    def key(self) -> str:
        self._fail("key")
        return KEY

    def read(self, data: bytes) -> str | None:
        self._fail("read")
        return None if self.again else data.decode()

    def make(self) -> str:
        self.made += 1
        return VALUE

    def written(self, value: str) -> bytes:
        self._fail("written")
        return value.encode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(KINDS.switch, raising=False)
    disk_memo._warn.cache_clear()
    return tmp_path / "qfx" / "values"


def cache_in(folder: Path) -> DiskCache:
    found = KINDS.cache()
    assert found is not None and found.folder == folder
    return found


def test_what_one_made_the_others_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, later = Text(), Text()
    with caplog.at_level(logging.INFO, "kept"):
        assert [KINDS.get(first), KINDS.get(later)] == [VALUE, VALUE]
    assert (first.made, later.made) == (1, 0) and cache_in(folder).read(KEY) == VALUE.encode()
    assert caplog.messages == [f"read from {folder / KEY}"]


def test_what_has_to_be_made_again_replaces_the_former(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    KINDS.get(Text())
    cache_in(folder).write(KEY, b"former")
    entry = Text(again=True)
    assert KINDS.get(entry) == VALUE and entry.made == 1 and caplog.messages == []
    assert cache_in(folder).read(KEY) == VALUE.encode()


def damaged(folder: Path) -> Text:
    path = folder / KEY
    path.write_bytes(path.read_bytes()[:-1])
    return Text()


def linked(folder: Path) -> Text:
    (folder / KEY).rename(folder / "other.txt")
    (folder / KEY).symlink_to("other.txt")
    return Text()


def refused(why: Exception) -> Callable[[Path], Text]:
    return lambda folder: Text({"read": why})


UNREADABLE: dict[str, Callable[[Path], Text]] = {
    "damaged": damaged,
    "a link": linked,
    **{
        type(why).__name__: refused(why)
        for why in (ValueError("x"), KeyError("x"), TypeError("x"), RecursionError("x"))
    },
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_is_a_warning_and_is_replaced(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    KINDS.get(Text())
    entry = UNREADABLE[name](folder)
    assert KINDS.get(entry) == VALUE and entry.made == 1
    (said,) = caplog.messages
    assert said.startswith("the values are made anew: ")
    assert KINDS.get(later := Text()) == VALUE and later.made == 0


@pytest.mark.parametrize("method", ["key", "written"])
def test_what_cannot_be_kept_is_no_warning(
    method: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = Text({method: NotCached("it has hooks")})
    with caplog.at_level(logging.INFO, "kept"):
        assert [KINDS.get(entry) for _ in range(2)] == [VALUE] * 2
    assert entry.made == 2 and os.listdir(folder) == []
    assert caplog.messages == ["the values are not kept on disk: it has hooks"] * 2
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_other_errors_are_the_callers(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        KINDS.get(Text({"written": ZeroDivisionError()}))


# --- folders ---


def open_to_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.mkdir()
    folder.touch()


def no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)


def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*args: object, **others: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("happens", [open_to_all, a_file, no_home, full])
def test_a_folder_that_is_of_no_use_is_one_warning(
    happens: Callable[..., None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    happens(folder, monkeypatch)
    entry = Text()
    assert [KINDS.get(entry) for _ in range(3)] == [VALUE] * 3 and entry.made == 3
    (said,) = caplog.messages
    assert said.startswith("the values are not kept on disk: ")
    assert not folder.is_dir() or os.listdir(folder) == []


def test_it_is_switched_off_without_a_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QFX_KIND_CACHE", "0")
    entry = Text()
    with caplog.at_level(logging.INFO, "kept"):
        assert [KINDS.get(entry) for _ in range(2)] == [VALUE] * 2
    assert entry.made == 2 and caplog.messages == [] and not folder.exists()


def test_it_is_moved(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFX_KIND_CACHE", str(tmp_path / "elsewhere"))
    KINDS.get(Text())
    assert os.listdir(tmp_path / "elsewhere") == [KEY] and not folder.exists()


def test_those_that_were_not_used_for_longest_go(folder: Path) -> None:
    KINDS.get(Text())
    for age, name in enumerate("abc"):
        (folder / f"{name}.txt").touch()
        os.utime(folder / f"{name}.txt", (100 - age, 100 - age))
    KINDS.get(Text(again=True))
    assert {*os.listdir(folder)} == {KEY, "a.txt", "b.txt"}


def test_a_switch_is_known_by_its_name() -> None:
    assert is_switch(KINDS.switch) and is_switch("QFX_PROGRAM_CACHE")
    assert not is_switch("QFX_CPU_ISA") and not is_switch("MY_QFX_PROGRAM_CACHE")
