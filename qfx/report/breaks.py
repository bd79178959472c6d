"""Breaks: Dynamo's messages about code that it does not capture, as lines of a report."""

from __future__ import annotations

import re
from collections import Counter

from qfx.host.dynamo import break_counters

_PARTS = re.compile(r"^\s*(Explanation|Hint|Developer debug context): ?", re.MULTILINE)
_LONGEST = 320  # characters of a line
BEFORE = "said before this call, perhaps of other code: "


def break_messages() -> Counter[str]:
    """Returns Dynamo's messages about graph breaks since the process began or cleared them."""
    return break_counters()


def breaks_since(before: Counter[str]) -> tuple[str, ...]:
    """Returns one line for each message of Dynamo since `before`. If there is none, returns the
    earlier messages, because Dynamo skips code that it has given up without another message."""
    now = break_messages()
    new = now - before
    return tuple(sorted({f"{'' if new else BEFORE}{_line(message)}" for message in new or now}))


def _line(message: str) -> str:
    """Returns a message of Dynamo as one line: the construct, why Dynamo stops there, its first
    hint, and the object concerned."""
    what, *rest = _PARTS.split(message.partition("\n For more details")[0])
    parts = dict(zip(rest[-2::-2], rest[::-2], strict=True))  # the first of several hints
    why, _, _ = parts.get("Explanation", "").partition("\n\n")
    whom = parts.get("Developer debug context", "").strip()
    line = f"{what.strip()}: {why} {parts.get('Hint', '')}{f' [{whom}]' if whom else ''}"
    return " ".join(line.split())[:_LONGEST]
