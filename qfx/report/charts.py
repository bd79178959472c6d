"""Charts: the numbers of a report as SVG, with one line for each matmul.

Colours are names of CSS variables, so that the page that contains the charts decides between light
and dark. Marks that share a line differ by shape as well as by colour.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from qfx.io.errors import printable
from qfx.report.report_row import Row

# Stand-ins for CSS variables, which matplotlib does not know.
INK, LINE, FIRST, SECOND = "#010101", "#020202", "#030303", "#040404"
_VARIABLES = {
    INK: "var(--ink)",
    LINE: "var(--line)",
    FIRST: "var(--first)",
    SECOND: "var(--second)",
}
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "qfx",  # the same chart is the same file
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": LINE,
}
_WIDTH, _LINE, _FRAME = 10.0, 0.19, 0.75  # inches: of a chart, of a line, of title and axis
_LONGEST = 44  # characters of a matmul's name

Value = float | None
Panel = tuple[str, Callable[[Any], None]]


class Chart(NamedTuple):
    title: str
    note: str
    svg: str


def charts(rows: Sequence[Row], shares: Sequence[Value]) -> list[Chart]:
    """Returns the charts that have data. `shares`: the share of each row in the total error."""
    found = [_errors(rows, shares), _inputs(rows), _times(rows)]
    return [chart for chart in found if chart.svg]


def _errors(rows: Sequence[Row], shares: Sequence[Value]) -> Chart:
    measured = [i for i, row in enumerate(rows) if row.sqnr_db is not None]
    rows, parts = [rows[i] for i in measured], [100 * (shares[i] or 0) for i in measured]
    levels = [row.sqnr_db for row in rows]
    panels = (
        ("share of the error, %", lambda axis: _bars(axis, parts, "{:.1f}")),
        ("SQNR, dB", lambda axis: _bars(axis, levels, "{:.1f}")),
    )
    note = (
        "Of each matmul's output alone, for its input. The share is that of the divergence that "
        "the recipe predicts or, if it predicts none, of noise power relative to signal."
    )
    return Chart("Error", note, _svg(rows, panels))


def _inputs(rows: Sequence[Row]) -> Chart:
    rows = [row for row in rows if row.outlier_ratio is not None]
    ends = [(row.input_rms, row.input_max) for row in rows]
    ratios = [row.outlier_ratio for row in rows]
    panels = (
        ("rms and greatest element", lambda axis: _spans(axis, ends, ("rms", "greatest"))),
        ("greatest / rms", lambda axis: _ratios(axis, ratios, "{:.1f}")),
    )
    note = (
        "Elements of each matmul's left operand in the call. A high ratio leaves few codes to most "
        "of them."
    )
    return Chart("Activations", note, _svg(rows, panels))


def _times(rows: Sequence[Row]) -> Chart:
    rows = [row for row in rows if row.float_s and row.int8_s]
    ends = [(1e6 * (r.float_s or 0), 1e6 * (r.int8_s or 0)) for r in rows]
    gains = [(r.float_s or 0) / (r.int8_s or 1) for r in rows]
    hollow = [not row.measured for row in rows]
    panels = (
        ("microseconds a call", lambda axis: _spans(axis, ends, ("float", "int8"), hollow)),
        ("float time / int8 time", lambda axis: _ratios(axis, gains, "{:.2f}x", hollow)),
    )
    note = (
        "Filled marks and bars are measured on the given input, hollow ones predicted by the cost "
        "model."
    )
    return Chart("Time", note, _svg(rows, panels))


def _bars(axis: Any, values: Sequence[Value], form: str) -> None:
    lengths = [_finite(v) or 0 for v in values]
    bars = axis.barh(range(len(values)), lengths, height=0.6, color=FIRST)
    axis.bar_label(bars, [form.format(v) for v in values], padding=3)
    axis.set_xlim(min(0, *lengths), 1.15 * max(*lengths, 0) or 1)


def _ratios(
    axis: Any, values: Sequence[Value], form: str, hollow: Sequence[bool] | None = None
) -> None:
    """Draws bars from 1 to each value on a logarithmic axis, without filling for rows that are
    `hollow`."""
    lengths = [(_finite(v) or 1) - 1 for v in values]
    bars = axis.barh(
        range(len(values)), lengths, left=1, height=0.6, color=FIRST, edgecolor=FIRST, linewidth=0.8
    )
    for bar, empty in zip(bars, hollow or (), strict=False):
        bar.set_fill(not empty)
    axis.axvline(1, color=INK, linewidth=0.8)
    ends = [1 + length for length in lengths]
    for y, (end, value) in enumerate(zip(ends, values, strict=True)):
        axis.annotate(
            form.format(value), (max(end, 1), y), (3, 0), textcoords="offset points", va="center"
        )
    _logarithmic(axis, min(*ends, 1) / 1.1, 1.4 * max(*ends, 1.2))


def _spans(
    axis: Any,
    ends: Sequence[tuple[Value, Value]],
    names: tuple[str, str],
    hollow: Sequence[bool] | None = None,
) -> None:
    """Draws, for each row, two marks of different shape and colour on a logarithmic axis, and a
    line between them."""
    pairs = [[_positive(v) for v in pair] for pair in ends]
    axis.hlines(range(len(pairs)), *zip(*pairs, strict=True), color=LINE, linewidth=1.5, zorder=1)
    empty = hollow or [False] * len(pairs)
    for side, (name, marker, color) in enumerate(
        zip(names, ("o", "D"), (SECOND, FIRST), strict=True)
    ):
        x = [pair[side] for pair in pairs]
        faces = ["none" if e else color for e in empty]
        shape = {"s": 22, "marker": marker, "edgecolors": color, "linewidths": 1, "zorder": 2}
        axis.scatter(x, range(len(x)), c=faces, **shape)
        axis.scatter([], [], c=color, label=name, **shape)
    seen = [x for pair in pairs for x in pair if x == x] or [1.0]
    _logarithmic(axis, min(seen) / 1.3, 1.3 * max(seen))
    axis.legend(
        loc="lower right",
        bbox_to_anchor=(1, 0.99),
        ncols=2,
        frameon=False,
        borderpad=0,
        handlelength=1,
    )


def _logarithmic(axis: Any, least: float, most: float) -> None:
    axis.set_xscale("log")
    axis.set_xlim(least, most)
    steps = (1.0,) if most > 100 * least else (1.0, 2.0, 5.0)
    axis.xaxis.set_major_locator(LogLocator(subs=steps, numticks=9))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())


def _finite(value: Value) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _positive(value: Value) -> float:
    """Returns the value, or NaN, which matplotlib does not draw, if the value has no place on a
    logarithmic axis: None, infinite, zero or negative."""
    return value if value is not None and 0 < value < math.inf else math.nan


def _svg(rows: Sequence[Row], panels: Sequence[Panel]) -> str:
    """Draws the panels side by side, with one line for each row, and returns the SVG; '' without
    rows."""
    if not rows:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _FRAME + _LINE * len(rows)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, len(panels), sharey=True)
        for axis, (title, draw) in zip(axes, panels, strict=True):
            draw(axis)
            axis.set_title(title, fontsize=8, loc="left", fontweight="bold")
            axis.set_axisbelow(True)
            axis.grid(axis="x", linewidth=0.5)
            axis.spines[["top", "right", "left"]].set_visible(False)
            axis.tick_params(length=0)
        axes[0].set_yticks(range(len(rows)), [_name(row) for row in rows], parse_math=False)
        axes[0].set_ylim(len(rows) - 0.4, -0.6)
        with io.StringIO() as text:
            figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
            return _inline(text.getvalue())


def _name(row: Row) -> str:
    name = printable(row.module or row.node)
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


def _inline(svg: str) -> str:
    """Returns an SVG drawing as a part of a page, with the colours and fonts of the page."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # several drawings share a page
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*" height="[^"]*"|(<svg )', r"\1\2", svg, count=1)
    svg = re.sub(r"font: ((?:\w+ )*\d[\d.]*px) [^;\"]*", r"font: \1 var(--font)", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg
