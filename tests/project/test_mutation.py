"""`make mutate` finds a gap in the tests of a small package, and counts right."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.mutants.tree import Tree
from tests.mutation.mutants import LineMutant, changed_lines, evenly, mutants_of
from tests.mutation.run import run, summary
from tests.mutation.seen import Seen, record

BEFORE = "UNUSED = 1\n\n\ndef half(x):\n    return x\n"
AFTER = """UNUSED = 1


def half(x):
    if x < 0:
        raise ValueError(x)
    return x // 2
"""
TESTS = """
from qfx.half import half

def test_half():
    assert half(5) == 2

def test_broken():
    assert half(5) == 3
"""


def _repository(root: Path) -> None:
    """A commit of BEFORE, and AFTER on top of it."""
    hook = Path(__file__).parents[1] / "mutants" / "hook" / "sitecustomize.py"
    recorder = Path(__file__).parents[1] / "mutation" / "recorder.py"
    texts = {
        "qfx/__init__.py": "",
        "qfx/half.py": BEFORE,
        "tests/__init__.py": "",
        "tests/test_half.py": TESTS,
        "tests/mutants/hook/sitecustomize.py": hook.read_text(),
        "tests/mutation/recorder.py": recorder.read_text(),
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "before")):
        subprocess.run(("git", *words), cwd=root, check=True)
    (root / "qfx" / "half.py").write_text(AFTER)


def test_a_mutant_is_caught_and_one_survives(tmp_path: Path) -> None:
    root = tmp_path / "root"
    _repository(root)
    changed = changed_lines(root, "HEAD")
    assert changed == {"qfx/half.py": {5, 6, 7}}
    tree = Tree(root, tmp_path / "copy")
    tree.copy()
    seen = record(tree, [*changed], ["tests"], 60)
    assert seen.failed == {"tests/test_half.py::test_broken"}
    assert seen.tests_of("qfx/half.py", (7,)) == ["tests/test_half.py::test_half"]

    assert seen.tests_of("qfx/half.py", (1,)) == seen.tests_of("qfx/half.py", (7,))  # at import

    made = evenly(mutants_of("qfx/half.py", AFTER, changed["qfx/half.py"]))
    caught, survivor = ("return x / 2", "if x <= 0:")
    chosen = [m for m in made if f"+    {caught}" in m.diff or f"+    {survivor}" in m.diff]
    results = run([tree], chosen, seen, time.monotonic() + 60)
    assert {r.mutant.place: r.outcome.status for r in results} == {
        "qfx/half.py:5": "survived",
        "qfx/half.py:7": "caught",
    }
    text = summary(len(made), results, 1)
    assert "survived qfx/half.py:5: 1 of 1 tests\n-    if x < 0:\n+    if x <= 0:\n" in text
    assert text.endswith(
        f"{len(made)} mutants: 1 caught, 1 survived, "
        f"{len(made) - 2} left for lack of time, 1.0 minutes"
    )
    assert (tree.path / "qfx" / "half.py").read_text() == AFTER
    assert run([tree], chosen, Seen(), time.monotonic()) == []


CODE = '''class A:
    @property
    def a(self):
        """Says nothing."""
        if self.b and self.c:
            self.call(
                "text",
                d=1,
            )
        return self.e
'''


def _of(line: int) -> set[str]:
    """The lines that mutants of this line put in the place of what there was."""
    mutants = mutants_of("a.py", CODE, {line})
    return {line[1:].strip() for m in mutants for line in m.diff.splitlines() if line[0] == "+"}


def test_mutants_change_the_lines_that_changed_in_decorated_functions_too() -> None:
    assert _of(4) == set()
    assert {"if self.b or self.c:", "if self.b:", "if self.c:"} <= _of(5)
    assert {"if not (self.b and self.c):"} <= _of(5)
    assert {"..."} <= _of(6)
    assert {"d=2,", "d=None,"} <= _of(8)
    assert _of(10) == {"return None"}


def test_each_line_has_one_mutant_before_any_has_its_second() -> None:
    mutants = [LineMutant("a.py", str(i), (1 + i // 3,), "") for i in range(9)]
    order = evenly(mutants)
    assert sorted(m.text for m in order) == sorted(m.text for m in mutants)
    assert [len({m.place for m in order[i : i + 3]}) for i in (0, 3, 6)] == [3, 3, 3]


def test_a_mutant_has_the_quickest_tests_of_a_minute() -> None:
    seen = Seen({"a.py": {1: {"slow", "quick", "long"}}}, {"quick": 1, "slow": 59, "long": 99})
    assert seen.first(seen.tests_of("a.py", (1,))) == ["quick", "slow"]
    assert seen.first(["long"]) == ["long"] and seen.first([]) == []
