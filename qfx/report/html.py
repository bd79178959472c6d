"""Html: a report as one HTML page without further files: a table, and charts as SVG, in light and
dark.

Needs jinja2 and matplotlib, the optional dependencies `report` of the package.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qfx.io.errors import printable
from qfx.report.remedies import remedy_of
from qfx.report.report_row import Row, float_rows

if TYPE_CHECKING:
    from qfx.report.report import Report

_TEMPLATE = Path(__file__).with_name("report.html")


def page(report: Report) -> str:
    """Returns the report as HTML. Raises ImportError if jinja2 or matplotlib is missing."""
    try:
        from jinja2 import Environment

        from qfx.report.charts import charts
    except ImportError as why:
        raise ImportError(
            f"save_html needs jinja2 and matplotlib, and {why.name} is not installed: "
            'pip install "qfx[report]" brings both'
        ) from why
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    lines = [_line(*each) for each in zip(report.rows, report.shares, strict=True)]
    used = [i for i in range(len(_COLUMNS)) if any(line.cells[i].text for line in lines)]
    return template.render(
        count=str(report).splitlines()[-1],
        mode=report.mode,
        facts=[fact._replace(where=printable(fact.where)) for fact in _facts(report)],
        breaks=[printable(line) for line in report.breaks],
        columns=[_COLUMNS[i] for i in used],
        remedies=Counter(line.remedy for line in lines).most_common(),
        lines=[_shown(line, used) for line in lines],
        last=[_shown(_line(row, None), used) for row in report.last_rows],
        notes=[printable(line) for line in (*report.notes, *report.of_whole) if line],
        charts=charts(report.rows, report.shares),
    )


def _shown(line: TableLine, used: Sequence[int]) -> TableLine:
    """Returns the line with only the cells of the columns `used`."""
    return line._replace(cells=[line.cells[i] for i in used])


class Column(NamedTuple):
    """A column of the table: its heading, and what its cells mean."""

    head: str
    meaning: str
    numeric: bool = True

    @property
    def kind(self) -> str:
        """The class of its cells in the style sheet."""
        return "number" if self.numeric else self.head


_COLUMNS = (
    Column("module", "path of the call site, and the node of its graph", False),
    Column("M×K×N", "rows, in and out features, a batch before the *; tile, instruction set"),  # noqa: RUF001
    Column("scheme", "how x and w become codes; R64 rotates K in blocks, factor scales it", False),
    Column("max/rms", "greatest element of the input relative to its root mean square"),
    Column("SQNR dB", "signal to quantization noise of this output alone, for its input"),
    Column("share", "of the divergence that the recipe predicts, else of noise relative to signal"),
    Column("float rows", "rows of the call that the guard ran in float, of all"),
    Column("float µs", "of one call; ~ predicted by the cost model, else measured"),
    Column("int8 µs", "of one call; ~ predicted by the cost model, else measured"),
    Column("gain", "float time / int8 time"),
    Column("bytes", "of the stored weight with its scales; bits of an element"),
    Column("reason", "why this scheme, or why float", False),
)


class Cell(NamedTuple):
    """A cell of the table: its text, the number by which it is sorted, and a second line of
    text."""

    text: str
    number: float | None = None
    below: str = ""

    @property
    def shown(self) -> Cell:
        return self._replace(text=printable(self.text), below=printable(self.below))


class TableLine(NamedTuple):
    """A line of the table. `remedy`: what one may do about the matmul, by which lines are
    chosen."""

    int8: bool
    cells: Sequence[Cell]
    remedy: str = ""


def _line(row: Row, share: float | None) -> TableLine:
    gain = row.float_s / row.int8_s if row.float_s and row.int8_s else None
    about = "" if row.measured else "~"
    cells = (
        Cell(row.module or row.node, below=row.node if row.module else ""),
        Cell(row.shape, _work(row.shape), row.kernel),
        Cell(row.scheme, below=row.transform),
        _cell("{:.1f}", row.outlier_ratio),
        _cell("{:.1f}", row.sqnr_db),
        _cell("{:.1%}", share),
        Cell(float_rows(row), row.guarded and row.guarded.float_rows),
        _cell(about + "{:.0f}", row.float_s and row.float_s * 1e6),
        _cell(about + "{:.0f}", row.int8_s and row.int8_s * 1e6),
        _cell(about + "{:.2f}×", gain),  # noqa: RUF001
        Cell(
            "" if row.weight_bytes is None else f"{row.weight_bytes:,}",
            row.weight_bytes,
            "" if row.bits is None else f"{row.bits:.1f} bits",
        ),
        Cell(row.reason),
    )
    return TableLine(row.scheme != "float", [cell.shown for cell in cells], remedy_of(row))


def _cell(form: str, value: float | None) -> Cell:
    return Cell("" if value is None else form.format(value), value)


def _work(shape: str) -> float | None:
    """Returns M * K * N of a printed shape; None if a size is unknown."""
    sizes = [int(size) for size in re.findall(r"\d+", shape)]
    return float(math.prod(sizes)) if sizes and "?" not in shape else None


class Fact(NamedTuple):
    value: str
    label: str
    where: str = ""


def _facts(report: Report) -> list[Fact]:
    """Returns the figures at the top of the page."""
    facts = [Fact(f"{report.quantized} of {report.total}", "matmuls in int8")]
    whole = report.whole
    if whole is not None and whole.gain is not None:
        facts.append(Fact(f"{whole.gain:.2f}×", "float time / int8 time of the whole model"))  # noqa: RUF001
    if whole is not None and whole.sqnr_db is not None:
        facts.append(Fact(f"{whole.sqnr_db:.1f} dB", "SQNR of the whole model's output"))
    read = report.weights_read
    if read is not None and read.floating:
        times = f"{read.floating / read.stored:.2f}×"  # noqa: RUF001
        sizes = f"{read.stored / 1e6:.3g} MB read a call, {read.floating / 1e6:.3g} MB in float"
        facts.append(Fact(times, f"smaller weights: {sizes}"))
    ran = [row for row in report.rows if row.measured and row.float_s and row.int8_s]
    if ran:
        float_s, int8_s = sum(r.float_s or 0 for r in ran), sum(r.int8_s or 0 for r in ran)
        times = f"{float_s * 1e3:.3g} ms in float, {int8_s * 1e3:.3g} ms in int8"
        facts.append(Fact(f"{float_s / int8_s:.2f}×", f"faster: {times}, all matmuls that ran"))  # noqa: RUF001
    noisy = [(row.sqnr_db, row) for row in report.rows if row.sqnr_db is not None]
    if noisy:
        level, row = min(noisy, key=lambda each: each[0])
        facts.append(Fact(f"{level:.1f} dB", "lowest SQNR", row.module or row.node))
        most, row = max(
            ((s, r) for s, r in zip(report.shares, report.rows, strict=True) if s is not None),
            key=lambda each: each[0],
        )
        facts.append(Fact(f"{most:.1%}", "largest share of the error", row.module or row.node))
    spread = [(row.outlier_ratio, row) for row in report.rows if row.outlier_ratio is not None]
    if spread:
        ratio, row = max(spread, key=lambda each: each[0])
        facts.append(Fact(f"{ratio:.0f}", "greatest max/rms", row.module or row.node))
    return facts
