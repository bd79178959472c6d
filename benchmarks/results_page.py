"""docs/results.md and the figure of the README: the saved results of all processors, side by side.

docs/results.template.md has the text of the page and says which figures each table shows.

`python -m benchmarks.results_page` rewrites both, docs/architectures.md and docs/census.md.
`python -m benchmarks.charts` draws the charts of the page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import census_page, survey_page
from benchmarks.common import RESULTS, ROOT, slug, stored
from benchmarks.question import Row
from benchmarks.results_age import TODAY, Age
from benchmarks.results_cells import BELOW, COMPUTED, ORDERS, Template, filled, not_run
from benchmarks.survey_page import rendered, table

PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
TEMPLATE = ROOT / "docs" / "results.template.md"
FIGURE_OF, FIGURE = "Intel 6-167", re.compile(r"(?<=<!-- figure -->\n).*?(?=<!-- end -->)", re.S)
FIGURE_ROWS = (
    "float32 eager",
    "bfloat16 Inductor",
    "qfx",
    "qfx exported",
    "torchao W8A8",
    "CTranslate2 int8",
    "ONNX Runtime int8",
    "OpenVINO int8",
)


@dataclass(frozen=True)
class Saved:
    """One saved file: the processor's short name, the question, the machine and the rows."""

    processor: str
    name: str
    machine: Row
    rows: list[Row]


def read(folder: Path = RESULTS) -> list[Saved]:
    """Reads every file of the folder except those with pages of their own. Each processor has a
    different name: the long one if short names agree."""
    found = []
    for path in sorted(folder.glob("*.json")):
        host, rows = stored(path)
        name = path.stem.removeprefix(f"{slug(host)}-")
        found.append(Saved(_name(host), name, host, [_computed(name, r, rows) for r in rows]))
    shared = Counter(short for short, _ in {(f.processor, slug(f.machine)) for f in found})
    return [
        replace(f, processor=_name(f.machine, whole=True)) if shared[f.processor] > 1 else f
        for f in found
        if f.name not in (survey_page.QUESTION, census_page.QUESTION)
    ]


def _computed(name: str, row: Row, rows: list[Row]) -> Row:
    return {**row, **COMPUTED[name](row, rows)} if name in COMPUTED else row


def _name(machine: Row, whole: bool = False) -> str:
    """Returns a name such as `AMD 26-2`: hypervisors hide names, so family and model follow the
    maker, or the `whole` name."""
    cpu = machine["cpu"] if whole else machine["cpu"].split()[0].removesuffix("(R)")
    return " ".join([cpu, "-".join(v for v in machine["family_model"] if v)]).strip()


def processors(files: Sequence[Saved]) -> str:
    """Returns a table with one row for each processor."""
    rows = {}
    for f in files:
        host = f.machine
        rows[f.processor] = {
            "processor": f.processor,
            "name": host["cpu"],
            "int8 instructions": ", ".join(host["flags"]),
            "virtual cores": str(host["cores"]),
            "torch": host["torch"],
            "Python": host["python"],
        }
    return table(list(rows.values()))


@dataclass(frozen=True)
class Tables:
    """The tables of one question's rows. `row`, and the keys and values of `columns`: templates of
    the first cell, of headings, and of cells. `split`: the heading of a separate table for some
    rows. `sources`: the measured code."""

    files: Sequence[Saved]
    age: Age
    head: str
    row: str
    columns: Mapping[str, Template]
    split: Template
    sources: Sequence[str]

    def text(self) -> str:
        """Returns the tables, the lines below each, and the threads and commits of the figures."""
        names = sorted({filled(self.split, row) or "" for f in self.files for row in f.rows})
        origin = dict.fromkeys(map(self._origin, self.files))
        return "\n".join([*map(self._table, names), *origin]) if names else "Not measured yet."

    def _table(self, name: str) -> str:
        files = [
            replace(f, rows=[r for r in f.rows if (filled(self.split, r) or "") == name])
            for f in self.files
        ]
        rows = [{self.head: row, **cells} for row, cells in self._grid(files).items()]
        below = [
            f"- {f.processor}, {line}" for f in files for line in BELOW.get(f.name, not_run)(f.rows)
        ]
        heading = [f"### {name}"] if name else []
        return "\n".join([*heading, table(rows), "", *below, *([""] if below else [])])

    def _grid(self, files: Sequence[Saved]) -> dict[str, dict[str, str]]:
        """Returns what was measured -> processor and column -> text, with every column in every
        row and those of a processor side by side.

        Raises ValueError if a figure would replace another.
        """
        found: dict[str, dict[str, str]] = {}
        columns: dict[str, dict[str, None]] = {f.processor: {} for f in files}
        rows = [(f, row) for f in files for row in f.rows]
        for f, row in sorted(rows, key=lambda fr: ORDERS.get(fr[0].name, lambda row: 0)(fr[1])):
            own = self._cells(f, row)
            label = filled(self.row, row) or ""
            there = found.setdefault(label, {})
            taken = [c for c in own if there.get(c, own[c]) != own[c]]
            if taken:
                places = "; ".join(f"{c}: {there[c]!r} and {own[c]!r}" for c in taken)
                raise ValueError(f"{f.name}: two figures for {label!r} of {places}")
            there.update(own)
            columns[f.processor].update(dict.fromkeys(own))
        names = [column for own in columns.values() for column in own]
        return {row: {c: own.get(c, "") for c in names} for row, own in found.items()}

    def _cells(self, f: Saved, row: Row) -> dict[str, str]:
        cells = {filled(head, row): filled(cell, row) for head, cell in self.columns.items()}
        if "reason" in row:
            cells = {next(iter(cells)): "not run"}
        return {f"{f.processor}, {h}": text for h, text in cells.items() if h and text}

    def _origin(self, f: Saved) -> str:
        commits = sorted({str(row["commit"]) for row in f.rows})
        listed = ", ".join(c[:8] + self.age.mark(c, self.sources) for c in commits)
        threads = sorted({int(row["threads"]) for row in f.rows})
        changed = any(row.get("uncommitted_changes") for row in f.rows)
        return (
            f"{f.processor}: {' and '.join(map(str, threads))} thread{'s' * (threads != [1])}, "
            f"commit {listed}{', with uncommitted changes' if changed else ''}."
        )


def page(files: Sequence[Saved], age: Age = TODAY) -> str:
    """Returns the text of docs/results.md.

    Raises ValueError if the template leaves a row out.
    """
    shown: set[int] = set()

    def tables(
        name: str,
        head: str,
        row: str,
        columns: Mapping[str, Template],
        sources: Sequence[str],
        split: Template = "",
        **only: Any,
    ) -> str:
        def selected(row: Row) -> bool:
            wanted = all(row.get(key) == value for key, value in only.items())
            return wanted and any(filled(heading, row) for heading in columns)

        own = [replace(f, rows=list(filter(selected, f.rows))) for f in files if f.name == name]
        own = [f for f in own if f.rows]
        shown.update(id(row) for f in own for row in f.rows)
        return Tables(own, age, head, row, columns, split, sources).text()

    text = rendered(TEMPLATE, tables=tables, joined=_joined, processors=processors(files))
    if lacking := [(f.name, row) for f in files for row in f.rows if id(row) not in shown]:
        raise ValueError(f"docs/results.template.md does not show {lacking[0]}")
    return text


def _joined(*parts: Mapping[str, Template]) -> dict[str, Template]:
    return {heading: cell for part in parts for heading, cell in part.items()}


def figure(files: Sequence[Saved]) -> str:
    """Returns the README's table: whole models on one thread of one processor, with the ways that a
    newcomer chooses from."""
    of = next(f for f in files if f.name == "models" and f.processor == FIGURE_OF)
    own = [row for row in of.rows if row["threads"] == 1 and "reason" not in row]
    found: dict[str, dict[str, str]] = {name: {"": name} for name in FIGURE_ROWS}
    for row in sorted(own, key=lambda row: (ORDERS["models"](row), row["model"])):
        if row["candidate"] in found:
            found[row["candidate"]][row["model"]] = row["text"]
    models = dict.fromkeys(model for texts in found.values() for model in texts)
    return table([{m: texts.get(m, "") for m in models} for texts in found.values()]) + "\n"


if __name__ == "__main__":
    saved = read()
    PAGE.write_text(page(saved))
    README.write_text(FIGURE.sub(lambda _: figure(saved), README.read_text()))
    survey_page.PAGE.write_text(survey_page.page(survey_page.read()))
    census_page.PAGE.write_text(census_page.page(census_page.read()))
