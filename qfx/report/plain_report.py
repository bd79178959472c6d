"""A report as plain values, which JSON holds."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qfx.report.remedies import remedy_of
from qfx.report.report_row import Row

if TYPE_CHECKING:
    from qfx.report.report import Report

FORMAT = 1


def plain_report(report: Report) -> dict[str, Any]:
    """Returns the numbers of a report. Times are in seconds, shares 0 to 1, SQNR in dB. None is
    what is unknown, and an SQNR without any error, since JSON has no infinity. Rows have the fields
    of `Row`, `share`, the part of the error, and `remedy`, what one may do about it."""
    whole = report.whole
    plain = {
        "format": FORMAT,
        "rows": [
            {**_row(row), "share": share}
            for row, share in zip(report.rows, report.shares, strict=True)
        ],
        "matmuls": report.total,
        "int8_matmuls": report.quantized,
        "graphs": report.graphs,
        "multiply_adds": dict(zip(("int8", "all", "uncounted"), report.macs, strict=True)),
        "weights": None if report.weights is None else _weights(report),
        "weights_read": None if report.weights_read is None else report.weights_read._asdict(),
        "whole": None
        if whole is None
        else {
            **{k: v for k, v in asdict(whole).items() if k != "routing"},
            "routing": [each._asdict() for each in whole.routing],
        },
        "training": report.training,
        "breaks": list(report.breaks),
        "notes": list(report.notes),
    }
    found: dict[str, Any] = finite(plain)
    return found


def finite(value: Any) -> Any:
    """Returns a copy of plain values in which numbers that are not finite are None."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(row: Row) -> dict[str, Any]:
    guarded = None if row.guarded is None else row.guarded._asdict()
    return {**asdict(row), "guarded": guarded, "remedy": remedy_of(row)}


def _weights(report: Report) -> dict[str, Any]:
    weights = report.weights
    assert weights is not None
    return {
        "quantized": weights.quantized,
        "floating": dict(weights.floating),
        "multiplying": dict(weights.multiplying),
    }
