"""docs/results.md and the figure of the README: the saved results of all processors, side by side.

python -m benchmarks.results_page           # rewrites both
python -m benchmarks.results_page --check   # fails if either would change
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from benchmarks.common import RESULTS, ROOT
from benchmarks.results_sections import SECTIONS, Section
from benchmarks.survey_page import table

PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
FIGURE_OF, FIGURE = "AMD 26-2", re.compile(r"(?<=<!-- figure -->\n).*?(?=<!-- end -->)", re.S)
FIGURE_ROWS = (
    "float32 eager",
    "float32 Inductor",
    "qfx",
    "qfx on AVX2",
    "torch quantize_dynamic",
    "torchao W8A8",
    "ONNX Runtime int8",
    "OpenVINO int8",
)
ELSEWHERE = {"architectures"}  # a page of its own
Row = dict[str, Any]

WIDTH = 110  # of a line of text

HEAD = """\
# Results
What `python -m benchmarks.results_page` makes of the files in `benchmarks/results`: every saved
figure of every processor, side by side. Times are medians. How each is measured, and what else ran:
[measuring](measuring.md). The survey of architectures has a page of its own:
[architectures](architectures.md). A figure of one machine is a promise for no other.

## Processors
"""


@dataclass(frozen=True)
class Saved:
    """One file: the processor's short name, its own name, the machine, its rows."""

    processor: str
    name: str
    machine: Row
    rows: list[Row]


def short_name(machine: Row) -> str:
    """`AMD 26-2`: hypervisors hide names, so the family and the model stand beside the maker."""
    maker = machine["cpu"].split()[0].removesuffix("(R)")
    return " ".join([maker, "-".join(v for v in machine["family_model"] if v)]).strip()


def shows(section: Section, name: str) -> bool:
    """Whether it is a table of the file of that name."""
    return re.fullmatch(f"(.+?)-{section.benchmark}", name) is not None


def read() -> list[Saved]:
    """Every file of `benchmarks/results` but those with pages of their own."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        if path.stem in ELSEWHERE:
            continue
        host, rows = (json.loads(path.read_text())[key] for key in ("machine", "rows"))
        if not any(shows(section, path.stem) for section in SECTIONS):
            raise ValueError(f"{path.name}: benchmarks/results_sections.py has no section for it")
        found.append(Saved(short_name(host), path.stem, host, rows))
    return found


def processors(files: Sequence[Saved]) -> str:
    """One row for each processor: what is known of it."""
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
    """Under each table: the threads and the commits of its figures."""
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


def grid(files: Sequence[Saved], section: Section) -> dict[str, dict[str, str]]:
    """What was measured -> processor and way -> text, with every column in every row."""
    cells: dict[str, dict[str, str]] = {}
    for f in files:
        for row in sorted(filter(section.only, f.rows), key=section.order):
            found = {f"{f.processor}, {w}": t for w, t in section.cells(row, f.rows).items()}
            cells.setdefault(section.row(row), {}).update(found)
    columns = dict.fromkeys(column for found in cells.values() for column in found)
    return {name: {c: found.get(c, "") for c in columns} for name, found in cells.items()}


def pivot(files: Sequence[Saved], section: Section) -> str:
    """A row for each thing measured, a column for each way of each processor."""
    rows = [{section.head: name, **found} for name, found in grid(files, section).items()]
    return table(rows) + "\n"


def page(files: Sequence[Saved]) -> str:
    """docs/results.md."""
    text, title = HEAD + processors(files), ""
    for section in SECTIONS:
        own = [f for f in files if shows(section, f.name)]
        if not own:
            continue
        text += "\n" if section.title == title else f"\n## {section.title}\n"
        title = section.title
        text += f"{fill(section.text, WIDTH)}\n\n{pivot(own, section)}\n{sources(own, section)}"
    return text


def figure(files: Sequence[Saved]) -> str:
    """The README's: whole models on one processor, the ways that a newcomer chooses from."""
    section = next(s for s in SECTIONS if s.benchmark == "models")
    own = [f for f in files if shows(section, f.name) and f.processor == FIGURE_OF]
    found = grid(own, section)
    rows = [
        {"": name} | {column.partition(", ")[2]: text for column, text in found[name].items()}
        for name in FIGURE_ROWS
    ]
    return table(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a page would change")
    files, readme = read(), README.read_text()
    new = {PAGE: page(files), README: FIGURE.sub(lambda _: figure(files), readme)}
    if parser.parse_args().check:
        old = [path.name for path, text in new.items() if path.read_text() != text]
        sys.exit(f"out of date: {', '.join(old)}" if old else None)
    for path, text in new.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
