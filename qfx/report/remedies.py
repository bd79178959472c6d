"""Remedies: what one may do about a matmul that is float, told by its reason."""

from __future__ import annotations

from qfx.match.base import FLOAT
from qfx.report.report_row import Row

INT8 = "int8"
FIXED = "no option changes it"
UNSEEN = "in no captured graph: not called on these inputs, or by code Dynamo does not capture"
# Phrase of a reason -> what one may do. The first that fits counts.
_REMEDIES = {
    "skipped by the pattern": "change skip",
    "not among only=": "change only",
    UNSEEN: "explain with other inputs",
    "minimum_gain": "set minimum_gain=0",
    "the recipe does not name it": "calibrate again",
    "the pinned plan does not name it": "pin the plan again",
}


def remedy_of(row: Row) -> str:
    """Returns what one may do about a matmul, `INT8` if it is quantized, `FIXED` if nothing."""
    if row.scheme != FLOAT:
        return INT8
    fitting = (remedy for phrase, remedy in _REMEDIES.items() if phrase in row.reason)
    return next(fitting, FIXED)
