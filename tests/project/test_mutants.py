"""The table of planted defects is sound, and its runner tells a defect that is seen from one that
is not. Planting them is `make mutants`."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.mutant import Mutant, TestFiles, expression, parts_of, sources
from tests.mutants.run import PYTEST, outcome_of
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_long_and_no_row_is_there_twice() -> None:
    assert len(MUTANTS) >= 60
    for texts in ([m.name for m in MUTANTS], [(m.old, m.new) for m in MUTANTS]):
        assert [text for text, count in Counter(texts).items() if count > 1] == []


def test_each_row_has_one_place_and_tests_that_exist() -> None:
    texts, files = sources(ROOT), TestFiles(ROOT)
    for mutant in MUTANTS:
        mutant.place(texts)
        assert mutant.new != mutant.old, mutant.name
        several = [t for t in mutant.tests if len(files.defining(t)) > 1 and "[" not in t]
        assert not several, f"{mutant.name}: of several {several}, say which by name[word]"


def test_the_words_of_each_row_select_a_case() -> None:
    files = TestFiles(ROOT)
    tests = sorted({test for mutant in MUTANTS for test in mutant.tests if "[" in test})
    paths = sorted({str(path) for test in tests for path in files.defining(test)})
    command = (*PYTEST, "--collect-only", "-k", expression(tests), *paths)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    cases = result.stdout.lower().splitlines()
    assert [test for test in tests if not any(_selects(test, case) for case in cases)] == []


def _selects(test: str, case: str) -> bool:
    name, words = parts_of(test)
    return f"::{name}" in case and all(word.lower() in case for word in words)


SOURCE = "def half(x):\n    return x // 2\n"
TESTS = """
from pathlib import Path

exec(Path("csrc/half.h").read_text())

def test_half():
    assert half(5) == 2

def test_of_zero():
    assert half(0) == 0

def test_end():
    while half(5) != 2:
        pass

def test_death():
    assert half(5) == 2 or __import__("os").abort()
"""


def _outcome(folder: Path, new: str, test: str, **how: Any) -> tuple[str, str]:
    for name, text in (("csrc/half.h", SOURCE), ("tests/test_half.py", TESTS)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    place = Mutant("a defect", "x // 2", new, (test,)).place(sources(folder))
    (folder / place).write_text(SOURCE.replace("x // 2", new))
    outcome = outcome_of(folder, [test], {}, "-x", **how)
    return outcome.status, outcome.by


@pytest.mark.parametrize(
    ("new", "test", "status", "by"),
    [
        ("x / 2", "test_half", "caught", "test_half.py::test_half"),
        ("x / 2", "test_half[none]", "broken", "4 deselected"),
        ("x / 2", "test_of_zero", "survived", ""),
        ("x / 2", "test_death", "caught", "died of SIGABRT"),
        ("x /", "test_half", "broken", "SyntaxError"),
    ],
)
def test_what_became_of_a_defect(tmp_path: Path, new: str, test: str, status: str, by: str) -> None:
    found = _outcome(tmp_path, new, test)
    assert found[0] == status and by in found[1], found


def test_a_defect_without_end_is_ended(tmp_path: Path) -> None:
    assert _outcome(tmp_path, "x / 2", "test_end", limit=5) == ("caught", "no end after 5 s")


def test_what_the_tests_print_is_heard_while_they_run(tmp_path: Path) -> None:
    lines: list[str] = []
    _outcome(tmp_path, "x // 2", "test_half", heard=lines.append)
    assert any("[100%]" in line for line in lines) and "passed" in lines[-1]


@pytest.mark.parametrize("text", ["", SOURCE + SOURCE])
def test_a_text_that_is_not_there_once_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "half.h").write_text(text)
    with pytest.raises(ValueError, match=r"a defect: its text is to be found once"):
        Mutant("a defect", "x // 2", "x / 2", ("test_half",)).place(sources(tmp_path))
    with pytest.raises(ValueError, match=r"no test is called test_half"):
        TestFiles(tmp_path).defining("test_half")
