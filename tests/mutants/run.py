"""Plants each defect, runs its tests and says what became of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant, TestFiles, expression, sources
from tests.mutants.tree import Failed, Tree

LIMIT = 240  # seconds for the tests of one defect, which may make them run without end
_FAILED = re.compile(r"^(?:FAILED|ERROR) (?:\S*/)?([^/\s]+\.py::.*?)(?: - .*)?$", re.MULTILINE)
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short"),
    *("-p", "no:cacheprovider"),
)


@dataclass(frozen=True)
class Outcome:
    """What the tests said. `status`: caught, survived, broken or left out; `by` which, or why."""

    status: str
    by: str


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    where: str
    outcome: Outcome
    seconds: float


def outcome_of(
    tree: Path,
    tests: Sequence[str],
    environment: dict[str, str],
    *more: str,
    limit: float = LIMIT,
    heard: Callable[[str], object] = bool,
) -> Outcome:
    """Runs these tests in a tree until one fails; `heard` gets each line that they print."""
    known = TestFiles(tree)
    files = dict.fromkeys(str(path) for test in tests for path in known.defining(test))
    words = [*PYTEST, *more, "-k", expression(tests), *files]
    return outcome(words, tree, environment, limit, heard)


def outcome(
    words: Sequence[str],
    tree: Path,
    environment: dict[str, str],
    limit: float,
    heard: Callable[[str], object] = bool,
) -> Outcome:
    """Runs pytest with these words in a tree."""
    code, output = ended(words, tree, environment, limit, heard)
    if code is None:
        return Outcome("caught", f"no end after {limit:.0f} s")
    if code < 0:
        return Outcome("caught", f"the process died of {signal.Signals(-code).name}")
    if code == 1 and (found := _FAILED.search(output)):
        return Outcome("caught", found[1])
    return Outcome("survived", "") if code == 0 else Outcome("broken", output[-3000:])


def ended(
    words: Sequence[str],
    tree: Path,
    environment: dict[str, str],
    limit: float,
    heard: Callable[[str], object] = bool,
) -> tuple[int | None, str]:
    """Exit status, None for none in time, and what was printed."""
    process = subprocess.Popen(
        words,
        cwd=tree,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            heard(line)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            reading.result(timeout=limit)
            return process.wait(), "".join(lines)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
            process.wait()
            return None, ""


def survey(root: Path, folder: Path, mutants: Sequence[Mutant]) -> list[Result]:
    """Plants all of them, one after another, in a copy.

    Raises Failed where the tests fail without a defect, ValueError for a row that fits nothing.
    """
    texts = sources(root)
    places = {mutant: mutant.place(texts) for mutant in mutants}
    tree = Tree(root, folder)
    _say(f"{len(mutants)} defects; copying the sources to {tree.path}")
    tree.copy()
    _say("compiling the tree without a defect, for some minutes the first time")
    tree.build()
    tree.install()
    isas = tree.check()
    here = {m for m in mutants if not m.isa or m.isa in isas}
    _check_without_defects(tree, here)
    return [
        _result(tree, mutant, where)
        if mutant in here
        else Result(mutant, where, Outcome("left out", f"no {mutant.isa} here"), 0)
        for mutant, where in places.items()
    ]


def _check_without_defects(tree: Tree, mutants: Iterable[Mutant]) -> None:
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    _say(f"running their {len(tests)} tests without a defect, for some minutes")
    start, together = time.monotonic(), ("-n", "2", "--dist", "worksteal")
    how = {"limit": 10 * LIMIT, "heard": _Percents().say}
    found = outcome_of(tree.path, tests, tree.environment, *together, **how)
    if found.status != "survived":
        raise Failed(f"without a defect the tests fail: {found.by}")
    _say(f"they pass, in {time.monotonic() - start:.0f} s")


class _Percents:
    """Says of each tenth of the tests that it has run."""

    def __init__(self) -> None:
        self._said = 0

    def say(self, line: str) -> None:
        found = re.search(r"\[ *(\d+)%\]$", line)
        if found and int(found[1]) >= self._said + 10:
            self._said = int(found[1])
            _say(f"  {self._said} %")


def _result(tree: Tree, mutant: Mutant, where: str) -> Result:
    start = time.monotonic()
    try:
        text = (tree.path / where).read_text().replace(mutant.old, mutant.new)
        with tree.planted(where, text):
            found = outcome_of(tree.path, mutant.tests, tree.environment, "-x")
    except Failed as why:
        found = Outcome("broken", str(why)[-3000:])
    seconds = time.monotonic() - start
    _say(f"{found.status:8} {seconds:4.0f} s  {where}: {mutant.name}: {found.by}")
    return Result(mutant, where, found, seconds)


def _say(line: str) -> None:
    print(line, flush=True)
