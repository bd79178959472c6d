"""Plants mutants in copies of the tree, side by side, until the time is over."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from tests.mutants.run import PYTEST, Outcome, outcome
from tests.mutants.tree import Tree
from tests.mutation.mutants import LineMutant
from tests.mutation.seen import Seen


@dataclass(frozen=True)
class LineResult:
    """`outcome.status`: caught, survived, or broken if its tests have other names. `tests`: how
    many could see the mutant, and how many of them ran."""

    mutant: LineMutant
    outcome: Outcome
    tests: str

    def __str__(self) -> str:
        caught = self.outcome.status == "caught"
        after = self.outcome.by if caught else f"{self.tests}\n{self.mutant.diff}"
        return f"{self.outcome.status:8} {self.mutant.place}: {after}"


def run(
    trees: Sequence[Tree],
    mutants: Sequence[LineMutant],
    seen: Seen,
    end: float,
    heard: Callable[[LineResult], object] = bool,
) -> list[LineResult]:
    """Plants the mutants in this order until `end` (time.monotonic()), one at a time in a tree."""
    waiting, results = deque(mutants), list[LineResult]()

    def lane(tree: Tree) -> None:
        while time.monotonic() < end:
            try:
                mutant = waiting.popleft()
            except IndexError:
                return
            results.append(_result(tree, mutant, seen))
            heard(results[-1])

    with suppress(KeyboardInterrupt), ThreadPoolExecutor(len(trees)) as pool:
        try:
            for each in [pool.submit(lane, tree) for tree in trees]:
                each.result()
        finally:  # each lane ends what it has begun, so that the copies are clean
            waiting.clear()
    return results


def _result(tree: Tree, mutant: LineMutant, seen: Seen) -> LineResult:
    known = seen.tests_of(mutant.where, mutant.lines)
    tests = seen.first(known)
    count = f"{len(tests)} of {len(known)} tests"
    if not tests:
        return LineResult(mutant, Outcome("survived", ""), count)
    names = tree.path.parent / "tests.txt"
    names.write_text("\n".join(tests))
    limit = 60 + 10 * sum(seen.seconds[test] for test in tests)
    with tree.planted(mutant.where, mutant.text):
        found = outcome([*PYTEST, "-x", f"@{names}"], tree.path, tree.environment, limit)
    if found.status == "broken" and "ERROR: not found: " not in found.by:
        found = Outcome("caught", "the tests cannot be imported")
    return LineResult(mutant, found, count)


def summary(made: int, results: Sequence[LineResult], minutes: float) -> str:
    """What became of all mutants: first those that were not caught, with their differences."""
    count = Counter(result.outcome.status for result in results)
    open_ones = sorted(str(r) for r in results if r.outcome.status != "caught")
    parts = [f"{number} {status}" for status, number in sorted(count.items())]
    parts += [f"{made - len(results)} left for lack of time", f"{minutes:.1f} minutes"]
    return "\n".join([*open_ones, f"{made} mutants: {', '.join(parts)}"])
