"""The documents tell the truth: their code runs, their tour is current, their names exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from benchmarks import results_page
from benchmarks.charts import CHARTS, FOLDER, svg
from benchmarks.results_age import unmarked
from qfx.report.report import Report, Row
from tests.lib.fresh_process import run_python

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
README_LINES = 130  # what a newcomer reads; the rest are pages
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
SOURCES = [
    path
    for folder in ("qfx", "csrc", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".cpp", ".h", ".inc"}
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# A file or folder in backticks; `<isa>` and `*` stand for parts of a name.
NAMED_FILE = re.compile(r"`((?:qfx|csrc|tests|docs|benchmarks|examples|\.ci)/[^`\s]*)`")
# A source file in backticks without its folder.
NAMED_SOURCE = re.compile(r"`([\w.]+\.(?:py|h|cpp|cu|cuh|inc|cmake|toml))`")
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _script(path: Path) -> str:
    """The page's code, each line at its own number, so that errors name the page's line."""
    text, script = path.read_text(), ""
    for block in BLOCK.finditer(text):
        script += "\n" * (text.count("\n", 0, block.start(1)) - script.count("\n")) + block[1]
    return script


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if _script(p)], ids=_name)
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    """In order, in one fresh process, as a reader would paste them; qfx must not warn. The first
    page finds an empty cache, as a newcomer's is, and measures what things cost."""
    caches = {"XDG_CACHE_HOME": str(tmp_path)} if path == README else {}
    result = run_python(_script(path), environment=caches, folder=tmp_path, warnings_of="qfx")
    assert result.returncode == 0, result.stderr
    assert "matmuls in int8" in result.stdout


def test_the_readme_is_short_and_has_code() -> None:
    """The test above has nothing to run on a page without blocks."""
    assert len(BLOCK.findall(README.read_text())) >= 5
    assert len(README.read_text().splitlines()) <= README_LINES


def test_every_page_is_reached_from_the_readme() -> None:
    pages, reached = [README], {README}
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+\.md)", page.read_text()):
            to = (page.parent / link).resolve()
            pages += [to] if to not in reached else []
            reached.add(to)
    written = [p for p in (ROOT / "docs").glob("*.md") if ".template" not in p.name]
    assert len(written) > 12 and [_name(p) for p in written if p not in reached] == []


def test_every_page_is_in_the_index_once() -> None:
    """docs/README.md sorts the pages: tutorial, how-to, reference, explanation."""
    linked = re.findall(r"^- \[[^]]+\]\((\w+\.md)\): ", (ROOT / "docs/README.md").read_text(), re.M)
    others = [p.name for p in (ROOT / "docs").glob("*.md") if ".template" not in p.name]
    assert sorted([*linked, "README.md"]) == sorted(others)


def test_source_files_without_a_folder_exist() -> None:
    """With a folder they are found by the test of links below."""
    folders = ("qfx", "csrc", "tests", "benchmarks", "examples", "docs")
    there = {p.name for folder in folders for p in (ROOT / folder).rglob("*")}
    there |= {p.name for p in ROOT.iterdir()}
    named = {
        (_name(page), name) for page in PAGES for name in NAMED_SOURCE.findall(page.read_text())
    }
    assert len(named) > 10 and {(page, name) for page, name in named if name not in there} == set()


@pytest.mark.parametrize("name", CHARTS)
def test_charts_show_what_the_files_say(name: str) -> None:
    """Texts are compared, since another matplotlib draws other lines."""
    drawn = svg(CHARTS[name], results_page.read())
    texts = re.findall(r"<text [^>]*>(.*?)</text>", drawn)
    assert len(texts) > 8
    assert re.findall(r"<text [^>]*>(.*?)</text>", (FOLDER / f"{name}.svg").read_text()) == texts


def test_the_first_table_of_the_readme_is_in_the_results() -> None:
    table, results = README.read_text().split("\n\n")[2], results_page.PAGE.read_text()
    of = ("bert-1x128", "smollm2, batch 1, context 128, 1 thread")
    tables = "".join(results.split(f"### {name}\n")[1].split("\n\n")[0] for name in of)
    figures = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?=x| ms| tokens/s|\*\*)", table)
    saved = {*re.findall(r"\d+(?:\.\d+)?", tables)}
    assert len(figures) == 12 and [figure for figure in figures if figure not in saved] == []


def test_tour_is_up_to_date() -> None:
    result = run_python(ROOT / "docs" / "make_tour.py", "--check")
    assert result.returncode == 0, result.stderr


def _defined_equations() -> set[str]:
    text = (ROOT / "docs/numerics.md").read_text()
    return set(re.findall(r"\*\*\(([A-Z]\d+)\)\*\*", text))


def test_cited_equations_exist() -> None:
    defined = _defined_equations()
    assert len(defined) > 8
    cited = {
        (_name(path), equation)
        for path in [*SOURCES, *DOCUMENTS]
        for equation in re.findall(r"\(([QGEBTWHARFD]\d+)\)", path.read_text())
    }
    assert {c for c in cited if c[1] not in defined} == set()


def test_every_equation_is_cited_by_code_or_tests() -> None:
    text = "".join(path.read_text() for path in SOURCES)
    assert {e for e in _defined_equations() if f"({e})" not in text} == set()


def test_every_room_and_every_path_is_in_the_architecture() -> None:
    """Rooms have rows, and what the text names is there."""
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [p.parent for p in (ROOT / "qfx").glob("*/__init__.py")]
    places = [f"`{p.relative_to(ROOT).as_posix()}/`" for p in rooms]
    places += [f"`qfx/{p.name}`" for p in (ROOT / "qfx").glob("*.py") if p.name != "__init__.py"]
    assert [place for place in places if place not in text] == []
    named = re.findall(r"`((?:qfx|csrc|tests|examples|benchmarks)/[\w/]+(?:\.\w+)?)`", text)
    assert len(named) > 40 and [path for path in named if not (ROOT / path).exists()] == []


def test_the_page_of_options_is_the_config() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_options.py"))
    assert (ROOT / "docs/options.md").read_text() == made["page"]()


def test_a_row_that_the_page_of_options_lacks_is_named() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_options.py"))["page"]
    del page.__globals__["PURPOSES"]["w8"]
    with pytest.raises(AssertionError, match=r"PURPOSES has the rows .* not in order .*'w8'"):
        page()


def test_the_page_of_results_is_what_the_files_say() -> None:
    """And so is the figure of the README. The marks of age are those of the day it was written."""
    files = results_page.read()
    assert len({f.processor for f in files}) >= 2
    assert unmarked(results_page.PAGE.read_text()) == unmarked(results_page.page(files))
    assert results_page.FIGURE.findall(README.read_text()) == [results_page.figure(files)]


def test_the_readme_begins_with_commands_that_exist() -> None:
    first_block = README.read_text().split("```")[1]
    assert re.findall(r"^make (\w+)", first_block, re.MULTILINE) == ["demo", "test"]


def test_the_quick_tests_exist() -> None:
    lines = (ROOT / "tests/quick.txt").read_text().splitlines()
    named = [line.removeprefix("--deselect=") for line in lines if "tests/" in line]
    assert len(named) > 20
    for path, _, function in (name.partition("::") for name in named):
        assert f"def {function}" in (ROOT / path).read_text(), (path, function)


def _anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def test_make_targets_files_and_links_exist() -> None:
    """`make` targets, files in backticks, links and anchors of all documents."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    checked, missing = 0, []
    for path in DOCUMENTS:
        text = path.read_text()
        used = re.findall(r"(?:`|^|[A-Z]=\w+ )make (?:[A-Z]+=\S+ )*([a-z]+)", text, re.MULTILINE)
        names = [re.sub(r"<\w+>", "*", name) for name in NAMED_FILE.findall(text)]
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        anchors = re.findall(r"\]\(([^)#:]*)#([^)]*)\)", text)
        lost = [target for target in used if target not in targets]
        lost += [name for name in names if not any(ROOT.glob(name.rstrip("/")))]
        lost += [to for to in links if not (path.parent / to).exists()]
        lost += [a for to, a in anchors if a not in _anchors(path.parent / to if to else path)]
        checked += len(used) + len(names) + len(links) + len(anchors)
        missing += [(_name(path), each) for each in lost]
    assert checked > 300 and missing == []


def test_the_printed_report_has_the_columns_of_today() -> None:
    columns = str(Report((Row("up", "linear", "1x2x3", "float", "", ""),), 1)).splitlines()[0]
    pages = (README, ROOT / "docs/explain.md")
    lines = [line for page in pages for line in page.read_text().splitlines()]
    printed = [line for line in lines if line.startswith("module ")]
    assert len(printed) == len(pages)
    assert [line for line in printed if line.split() != columns.split()] == []
