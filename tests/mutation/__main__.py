"""python -m tests.mutation [--base COMMIT] [--minutes N] [--tests "tests/nn ..."]"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import qfx._C as _C
from tests.mutants.tree import Failed, Tree
from tests.mutation.mutants import changed_lines, evenly, mutants_of
from tests.mutation.run import run, summary
from tests.mutation.seen import record, tests_near

ROOT = Path(__file__).resolve().parents[2]
say = partial(print, flush=True)


def main(base: str, minutes: float, tests: list[str]) -> None:
    start = time.monotonic()
    end = start + 60 * minutes
    changed = changed_lines(ROOT, base)
    made = [m for w, lines in changed.items() for m in mutants_of(w, (ROOT / w).read_text(), lines)]
    files = sorted({mutant.where for mutant in made})
    say(f"{len(made)} mutants of the lines in {len(files)} files that changed since {base}")
    if not made:
        return
    trees = [Tree(ROOT, ROOT / "build" / "mutation" / name) for name in ("one", "two")]
    for tree in trees:
        tree.copy()
        tree.install(Path(_C.__file__).parent)
        tree.check()
    tests = tests or tests_near(ROOT, files)
    say(f"recording which tests run these lines: {' '.join(tests)}")
    seen = record(trees[0], files, tests, end - time.monotonic())
    say(f"{len(seen.seconds)} tests ran, in {(time.monotonic() - start) / 60:.1f} minutes")
    for test in sorted(seen.failed):
        say(f"left out, since it fails without a mutant: {test}")
    results = run(trees, evenly(made), seen, end, say)
    say("\n" + summary(len(made), results, (time.monotonic() - start) / 60))


def default_base() -> str:
    """The commit at which this branch left origin/main, or the last one."""

    def commit(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True).stdout

    left = commit("merge-base", "HEAD", "origin/main").strip()
    return left if left and left != commit("rev-parse", "HEAD").strip() else "HEAD~1"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--base", default="")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--tests", default="")
    given = parser.parse_args()
    try:
        main(given.base or default_base(), given.minutes, given.tests.split())
    except Failed as why:
        sys.exit(str(why))
