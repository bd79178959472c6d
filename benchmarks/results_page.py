"""docs/results.md and the figure of the README: the saved results of all processors, side by side.

python -m benchmarks.results_page           # rewrites both
python -m benchmarks.results_page --check   # fails if either would change
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks import results_cells as cells
from benchmarks.common import RESULTS, ROOT, slug
from benchmarks.results_sections import SECTIONS
from benchmarks.results_table import Section
from benchmarks.survey_page import table

PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
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
ELSEWHERE = {"architectures"}  # a page of its own
Row = dict[str, Any]

WIDTH = 110  # of a line of text

HEAD = """\
# Results
This page shows every saved measurement of every processor side by side. Read it to compare qfx with
other libraries, or its options with each other. `python -m benchmarks.results_page` generates the
page from the files in `benchmarks/results`.

Times are medians. `1.5x` means 1.5 times as fast. "Float" is the unquantized model. How each table
is measured, and what else ran, is described in [measuring](measuring.md). The survey of
architectures has [its own page](architectures.md). Measurements on one machine do not predict
those on another machine. AMD 26-2 is an EPYC with Zen 5 cores, AMD 25-17 an EPYC with Zen 4 cores.

## Processors
"""


@dataclass(frozen=True)
class Saved:
    """One saved file: the processor's short name, the file's name, the machine and its rows."""

    processor: str
    name: str
    machine: Row
    rows: list[Row]


def short_name(machine: Row) -> str:
    """Returns a name such as `AMD 26-2`: hypervisors hide names, so family and model follow the
    maker."""
    maker = machine["cpu"].split()[0].removesuffix("(R)")
    return " ".join([maker, "-".join(v for v in machine["family_model"] if v)]).strip()


def long_name(machine: Row) -> str:
    """Returns all parts of which the name of the files consists."""
    return " ".join([machine["cpu"], "-".join(v for v in machine["family_model"] if v)]).strip()


def shows(section: Section, name: str) -> bool:
    """Whether the section shows the file of that name."""
    return re.fullmatch(f"(.+?)-{section.benchmark}", name) is not None


def read(folder: Path = RESULTS) -> list[Saved]:
    """Reads every file of the folder except those with pages of their own. Each processor has a
    different name: the long one if short names agree."""
    found = []
    for path in sorted(folder.glob("*.json")):
        if path.stem in ELSEWHERE:
            continue
        host, rows = (json.loads(path.read_text())[key] for key in ("machine", "rows"))
        if not any(shows(section, path.stem) for section in SECTIONS):
            raise ValueError(f"{path.name}: benchmarks/results_sections.py has no section for it")
        found.append(Saved(short_name(host), path.stem, host, rows))
    shared = Counter(short for short, _ in {(f.processor, slug(f.machine)) for f in found})
    return [
        replace(f, processor=long_name(f.machine)) if shared[f.processor] > 1 else f for f in found
    ]


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
    return table(list(rows.values())) + "\n"


def sources(files: Sequence[Saved], section: Section) -> str:
    """Returns the line under each table: the threads and the commits of its figures."""
    lines = []
    for f in files:
        shown = list(filter(section.only, f.rows))
        commits = sorted({str(row.get("commit") or f.machine["commit"])[:8] for row in shown})
        threads = sorted({int(row.get("threads") or f.machine["threads"]) for row in shown})
        changed = ", with uncommitted changes" if f.machine["uncommitted_changes"] else ""
        count = " and ".join(map(str, threads))
        lines.append(
            f"{f.processor}: {count} thread{'' if threads == [1] else 's'}, "
            f"commit {', '.join(commits)}{changed}."
        )
    return "\n".join(dict.fromkeys(lines)) + "\n"


def grid(files: Sequence[Saved], section: Section, name: str = "") -> dict[str, dict[str, str]]:
    """Returns the section's table of that name: what was measured -> processor and way -> text,
    with every column in every row and those of a processor side by side.

    Raises ValueError if a figure would replace another.
    """
    found: dict[str, dict[str, str]] = {}
    columns: dict[str, dict[str, None]] = {f.processor: {} for f in files}
    for f, row in _ordered(files, section, name):
        own = {f"{f.processor}, {way}": text for way, text in section.cells(row, f.rows).items()}
        there = found.setdefault(section.row(row), {})
        if taken := [c for c in own if there.get(c, own[c]) != own[c]]:
            places = "; ".join(f"{c}: {there[c]!r} and {own[c]!r}" for c in taken)
            raise ValueError(f"{f.name}: two figures for {section.row(row)!r} of {places}")
        there.update(own)
        columns[f.processor].update(dict.fromkeys(own))
    names = [column for own in columns.values() for column in own]
    return {row: {c: own.get(c, "") for c in names} for row, own in found.items()}


def _ordered(files: Sequence[Saved], section: Section, name: str) -> list[tuple[Saved, Row]]:
    rows = [(f, r) for f in files for r in filter(section.only, f.rows) if section.table(r) == name]
    return sorted(rows, key=lambda found: section.order(found[1]))


def tables(files: Sequence[Saved], section: Section) -> str:
    """Returns the tables of a section, each with a row for each thing measured and a column for
    each way of each processor, followed by the section's lines about each processor's rows."""
    names = {section.table(row) for f in files for row in filter(section.only, f.rows)}
    return "\n".join(_table(files, section, name) for name in sorted(names))


def _table(files: Sequence[Saved], section: Section, name: str) -> str:
    rows = [{section.head: row, **own} for row, own in grid(files, section, name).items()]
    below = [
        f"- {f.processor}, {line}"
        for f in files
        for line in section.below([r for r in f.rows if section.table(r) == name])
    ]
    heading = f"### {name}\n" if name else ""
    return f"{heading}{table(rows)}\n" + ("\n" + "\n".join(below) + "\n" if below else "")


def page(files: Sequence[Saved]) -> str:
    """Returns the text of docs/results.md."""
    text, title = HEAD + processors(files), ""
    for section in SECTIONS:
        own = [f for f in files if shows(section, f.name) and any(map(section.only, f.rows))]
        if not own:
            continue
        text += "\n" if section.title == title else f"\n## {section.title}\n"
        title = section.title
        text += f"{fill(section.text, WIDTH)}\n\n{tables(own, section)}\n{sources(own, section)}"
    return text


def figure(files: Sequence[Saved]) -> str:
    """Returns the README's table: whole models on one thread of one processor, with the ways that a
    newcomer chooses from."""
    section = next(s for s in SECTIONS if s.benchmark == "models")
    of = next(f for f in files if shows(section, f.name) and f.processor == FIGURE_OF)
    own = [row for row in of.rows if row["threads"] == 1 and "reason" not in row]
    found: dict[str, dict[str, str]] = {name: {"": name} for name in FIGURE_ROWS}
    for row in sorted(own, key=section.order):
        if row["candidate"] in found:
            found[row["candidate"]][row["model"]] = cells.speed(row, of.rows)
    models = dict.fromkeys(model for texts in found.values() for model in texts)
    return table([{m: texts.get(m, "") for m in models} for texts in found.values()]) + "\n"


def written() -> dict[Path, str]:
    """Returns the text of each page according to the saved results."""
    files, readme = read(), README.read_text()
    return {PAGE: page(files), README: FIGURE.sub(lambda _: figure(files), readme)}


def write() -> None:
    for path, text in written().items():
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a page would change")
    if parser.parse_args().check:
        old = [path.name for path, text in written().items() if path.read_text() != text]
        sys.exit(f"out of date: {', '.join(old)}" if old else None)
    write()


if __name__ == "__main__":
    main()
