"""Which tests run which lines, recorded once, and so which tests can see a mutant."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from tests.mutants.run import PYTEST, ended
from tests.mutants.tree import Failed, Tree

SECONDS = 60  # of tests that one mutant gets, the quickest first


@dataclass(frozen=True)
class Seen:
    """`lines`: file -> line -> tests that run it, '' for imports. `seconds` of each test. `failed`:
    tests that fail without a mutant, which are left out."""

    lines: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(dict))
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def tests_of(self, where: str, lines: Sequence[int]) -> list[str]:
        """The tests that run one of these lines, the quickest first. Lines that run at import,
        outside all tests, are left to the tests that run anything of their file."""
        known = self.lines[where]
        before = max((n for n in known if n <= lines[0]), default=0)  # their statement's first line
        found = set().union(*(known.get(n, ()) for n in (before, *lines))) - {""}
        found = found or set().union(*known.values()) - {""}
        return sorted(found - self.failed, key=self.seconds.__getitem__)

    def first(self, tests: Sequence[str]) -> list[str]:
        """Those of these tests that take SECONDS together, at least one."""
        totals = accumulate(self.seconds[test] for test in tests)
        return [
            test
            for i, (test, t) in enumerate(zip(tests, totals, strict=True))
            if t <= SECONDS or not i
        ]


def tests_near(root: Path, files: Iterable[str]) -> list[str]:
    """The tests of the files' folders and the quick ones, as arguments of pytest. They contain a
    test of 279 of the 326 defects of Python that were once planted by hand."""
    rooms = sorted({Path(file).parts[1] for file in files})
    folders = [f"tests/{room}" for room in rooms if (root / "tests" / room).is_dir()]
    return [*folders, "@tests/quick.txt"]


def record(tree: Tree, files: Sequence[str], tests: Sequence[str], limit: float) -> Seen:
    """Runs these tests in two processes, for at most `limit` seconds. Raises Failed."""
    folder = tree.path.parent / "records"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {
        **tree.environment,
        "MUTATION_FILES": os.pathsep.join(str(tree.path / file) for file in files),
        "MUTATION_RECORDS": str(folder),
        "COVERAGE_CORE": "ctrace",  # on every version of Python the one that can tell tests apart
    }
    how = ("-n", "2", "--dist", "worksteal", "-p", "tests.mutation.recorder")
    code, output = ended([*PYTEST, *how, *tests], tree.path, environment, limit)
    if code not in (0, 1):
        why = f"no end after {limit:.0f} s" if code is None else output[-3000:]
        raise Failed(f"the tests without a mutant: {why}")
    seen = Seen()
    for each in map(json.loads, map(Path.read_text, folder.iterdir())):
        seen.seconds.update(each["seconds"])
        seen.failed.update(each["failed"])
        for file, lines in each["lines"].items():
            known = seen.lines[str(Path(file).relative_to(tree.path))]
            for line, names in lines.items():
                known.setdefault(int(line), set()).update(names)
    return seen
