"""A report as plain values, which JSON holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qfx.report.remedies import remedy_of
from qfx.report.report_row import Row

if TYPE_CHECKING:
    from qfx.report.report import Report

FORMAT = 1


def plain_report(report: Report) -> dict[str, Any]:
    """Returns the numbers of a report. Times are in seconds, shares 0 to 1, SQNR in dB; an unknown
    number is None. Rows have the fields of `Row`, `share`, the part of the error, and
    `remedy`, what one may do about it."""
    whole = report.whole
    return {
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
