"""python -m tests.mutants [words]: those whose name or file contains one of the words, or all."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tabulate import tabulate

from tests.mutants.mutant import sources
from tests.mutants.run import survey
from tests.mutants.table import MUTANTS
from tests.mutants.tree import Failed

ROOT = Path(__file__).resolve().parents[2]


def main(words: list[str]) -> int:
    texts = sources(ROOT)
    named = {m: (m.name, m.place(texts)) for m in MUTANTS}
    chosen = [m for m, texts in named.items() if _fits(words, *texts)]
    if not chosen:
        print(f"no planted defect has {' or '.join(words)} in its name or file")
        return 1
    start = time.monotonic()
    results = survey(ROOT, ROOT / "build" / "mutants", chosen)
    rows = [(r.mutant.name, r.where, r.outcome.status, r.outcome.by[:100]) for r in results]
    print(tabulate(rows, ("defect", "file", "", "by"), disable_numparse=True))
    planted = [r for r in results if r.outcome.status != "left out"]
    caught = sum(r.outcome.status == "caught" for r in planted)
    minutes = (time.monotonic() - start) / 60
    print(f"{caught} of {len(planted)} planted defects were caught, in {minutes:.1f} minutes")
    return 0 if caught == len(planted) else 1


def _fits(words: list[str], *texts: str) -> bool:
    return not words or any(word in text for word in words for text in texts)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (Failed, ValueError) as why:
        sys.exit(str(why))
