"""The rank of qfx among the other ways to run a model: first, or n-th."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BASELINE = "float32 eager"
OWN = {"qfx": "qfx compiled", "qfx exported": "qfx exported"}  # candidate -> how it is called here
Row = dict[str, Any]


def standings(rows: Sequence[Row]) -> list[str]:
    """Returns one line for each of OWN among `rows`, of one model and one number of threads.

    The rank is by the speed relative to float32 eager of the same run. The others are all ways that
    are not qfx; a way that did not run is not counted.
    """
    others = [r for r in rows if "reason" not in r and not r["candidate"].startswith("qfx")]
    found = {row["candidate"]: row for row in rows}
    return [f"{OWN[name]}: {_place(found[name], others)}" for name in OWN if name in found]


def _place(row: Row, others: Sequence[Row]) -> str:
    if "reason" in row:
        return f"did not run. {row['reason']}"
    best = max(others, key=lambda r: r["ratio"], default=row)
    rank = 1 + sum(r["ratio"] > row["ratio"] for r in others)
    text = f"{ordinal(rank)} of {1 + len(others)}"
    if rank == 1:
        return text
    return f"{text}, {best['ratio'] / row['ratio']:.2f}x the first ({best['candidate']})"


def ordinal(rank: int) -> str:
    if rank == 1:
        return "first"
    teens = rank % 100 in (11, 12, 13)
    return f"{rank}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(rank % 10, 'th')}"
