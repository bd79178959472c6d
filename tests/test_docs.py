"""The documents are true: their code runs, the tour is what the code prints, names exist."""

from __future__ import annotations

import ast
import re
import runpy
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import qfx
from qfx.config import INNER, PRESETS
from qfx.report import Report, Row

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
SOURCES = [
    path
    for folder in ("qfx", "csrc", "tests", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cpp", ".h", ".inc", ".md")
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
EQUATION = re.compile(r"\(([QGEB]\d+)\)")
# A file of the repository, named in backticks; `<isa>` and `*` stand for parts of a name.
NAMED_FILE = re.compile(r"`((?:qfx|csrc|tests|docs|benchmarks|examples)/[^`\s]*)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=_name)
def test_code_blocks_run_in_order(page: Path) -> None:
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__main__"}
    text = page.read_text()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="qfx")  # nothing was left float by a fault
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start(1))
            code = compile("\n" * line + found[1], str(page), "exec")  # errors name the page's line
            exec(code, namespace)


def test_the_readme_has_code() -> None:
    """The test above would pass on a page without blocks."""
    assert len(BLOCK.findall(README.read_text())) >= 4


def test_the_tour_is_what_the_code_prints() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "make_tour.py"))
    assert script["TOUR"].read_text() == script["tour"](), "run python docs/make_tour.py"


def test_cited_equations_exist() -> None:
    defined = set(re.findall(r"\*\*\(([QGEB]\d+)\)\*\*", (ROOT / "docs/numerics.md").read_text()))
    cited = {(e, _name(p)) for p in SOURCES for e in EQUATION.findall(p.read_text())}
    assert {"Q3", "G1", "E1"} <= {equation for equation, _ in cited}
    assert not {(e, place) for e, place in cited if e not in defined}


def _options_table() -> dict[str, tuple[str, str]]:
    """Name -> (default, meaning) of the README's table of options."""
    section = README.read_text().split("\n## Options\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.*) \|$", section, re.MULTILINE)
    return {name: (default, meaning) for name, default, meaning in rows}


def test_the_options_table_is_the_config() -> None:
    table = _options_table()
    assert list(table) == [f.name for f in fields(qfx.Config)]
    for field in fields(qfx.Config):
        default = ast.literal_eval(table[field.name][0])
        assert (tuple(default) if isinstance(default, list) else default) == field.default
    for values, option in ((PRESETS, "scheme"), (INNER, "inner")):
        assert all(f"`{value}`" in table[option][1] for value in values)


def test_the_readme_begins_with_the_commands() -> None:
    first, second = README.read_text().splitlines()[1:3]
    assert first.startswith("make demo") and second.startswith("make test")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = {t for page in PAGES for t in re.findall(r"(?:^|[`\s])make ([a-z]+)", page.read_text())}
    commands = {t for t in used if f"`make {t}" in _all_text() or t in ("demo", "test")}
    assert {"demo", "test"} <= commands <= set(targets)


def _all_text() -> str:
    return "\n".join(page.read_text() for page in PAGES)


def test_the_printed_report_has_the_columns_of_today() -> None:
    row = Row("up", "linear", "1x2x3", "float", "", "")
    head = str(Report((row,), 1)).splitlines()[0]
    printed = [line for line in README.read_text().splitlines() if line.startswith("module")]
    assert printed and all(line.split() == head.split() for line in printed)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_named_files_and_links_exist(page: Path) -> None:
    text = page.read_text()
    files = [re.sub(r"<\w+>", "*", name) for name in NAMED_FILE.findall(text)]
    assert not [name for name in files if not any(ROOT.glob(name.rstrip("/")))]
    assert not [to for to in LINK.findall(text) if not (page.parent / to).exists()]
