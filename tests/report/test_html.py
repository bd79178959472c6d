"""Report.save_html: one page with the table and charts, as a real browser shows it."""

from __future__ import annotations

import html
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

import qfx
from qfx.io.errors import printable
from qfx.report.charts import charts
from qfx.report.html import _facts, page
from qfx.report.report import Report
from qfx.report.report_row import Row
from tests.lib.models import FEATURES, Block

X = torch.randn(2, 5, FEATURES)
OPTIONS = {"minimum_gain": 0, "scheme": qfx.Scheme(rotation=64)}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
    "--v=0", "--window-size=1400,1800", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


@pytest.fixture(scope="module")
def report() -> qfx.Report:
    return qfx.explain(Block(), X, options=OPTIONS)


def _browser() -> str:
    named = os.environ.get("QFX_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH, QFX_CHROMIUM is unset")
    return found


def _run(path: Path, *flags: str) -> tuple[str, list[str]]:
    """What the browser prints, and the messages of its console."""
    profile = f"--user-data-dir={path.with_suffix('.profile')}"
    command = [_browser(), *FLAGS, profile, *flags, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _rows(dom: str) -> list[list[str]]:
    """The text of the cells of the table's body."""
    body = dom[dom.index("<tbody>") : dom.index("</tbody>")]
    rows = re.findall(r"<tr.*?</tr>", body, re.DOTALL)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]
    return [[re.sub(r"<small>.*?</small>", "", cell) for cell in row] for row in cells]


def test_a_browser_shows_every_row_without_complaint(report: qfx.Report, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report.save_html(path)
    dom, messages = _run(path, "--dump-dom")
    assert messages == []
    assert [row[0] for row in _rows(dom)] == [row.module or row.node for row in report.rows]
    assert [row[-1] for row in _rows(dom)] == [row.reason for row in report.rows]
    assert dom.count("<svg ") == 3


@pytest.mark.parametrize("dark", [False, True])
def test_the_screenshot_has_a_page_on_it(report: qfx.Report, tmp_path: Path, dark: bool) -> None:
    path, shot = tmp_path / "report.html", tmp_path / "shot.png"
    report.save_html(path)
    _run(path, f"--screenshot={shot}", *["--force-dark-mode"] * dark)
    image = Image.open(shot).convert("RGB")
    colors = image.getcolors(maxcolors=1 << 24)
    assert colors is not None and len(colors) > 200  # text alone has its shades of grey
    count, paper = max(colors)
    assert (sum(paper) < 3 * 64) == dark
    assert 0.5 < count / (image.width * image.height) < 0.98
    first = (0x56, 0xB4, 0xE9) if dark else (0, 0x72, 0xB2)  # the charts' bars
    assert sum(count for count, color in colors if color == first) > 5000


def test_errors_of_the_page_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "broken.html"
    path.write_text("<script>missing()</script><img src='http://example.invalid/a.png'>")
    _, messages = _run(path, "--dump-dom")
    assert any("missing is not defined" in message for message in messages)


@pytest.mark.parametrize("clicks, order", [(0, "baced"), (1, "abced"), (2, "cbaed"), (3, "baced")])
def test_a_click_sorts_and_what_is_missing_comes_last(
    clicks: int, order: str, tmp_path: Path
) -> None:
    levels = {"b": 20.0, "a": -3.0, "c": math.inf, "e": None, "d": None}
    rows = [Row(n, "", "1x2x3", "s", "k", "why", sqnr_db=level) for n, level in levels.items()]
    click = "[...document.querySelectorAll('th button')].find(b => b.textContent === 'SQNR dB')"
    text = page(qfx.Report(tuple(rows), 1)) + f"<script>{f'{click}.click();' * clicks}</script>"
    path = tmp_path / "sorted.html"
    path.write_text(text)
    dom, messages = _run(path, "--dump-dom")
    assert messages == [] and "".join(row[0] for row in _rows(dom)) == order


def test_rows_are_chosen_by_what_one_may_do_about_them(tmp_path: Path) -> None:
    reasons = {"a": "skipped by the pattern 'a'", "b": "int8", "c": "below minimum_gain=1.1"}
    rows = [
        Row(name, "", "1x2x3", "s" if name == "b" else "float", "k", reason)
        for name, reason in reasons.items()
    ]
    choose = "const s = document.querySelector('#shown'); s.value = 'change skip';"
    script = f"<script>{choose} s.dispatchEvent(new Event('change'));</script>"
    path = tmp_path / "chosen.html"
    path.write_text(page(qfx.Report(tuple(rows), 1)) + script)
    dom, messages = _run(path, "--dump-dom")
    hidden = re.findall(r'<tr class="\w+" data-remedy="[^"]*"( hidden="")?>', dom)
    assert messages == [] and hidden == ["", ' hidden=""', ' hidden=""']


def test_the_page_needs_nothing_else(report: qfx.Report) -> None:
    text = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page(report))
    assert "http" not in text
    assert set(re.findall(r'(?:src|href)="([^#"][^"]*)"|url\(([^#][^)]*)', text)) <= {
        ("data:,", "")
    }
    ids = re.findall(r'\sid="([^"]*)"', text)
    used = re.findall(r'(?:url\(|href=")#([^")]*)', text)
    assert set(used) <= set(ids)


def test_names_are_text_and_not_markup() -> None:
    row = Row("<b>&</b>", "n", "1x2x3", "float", "", "<i>", 1.0, 1e-6, 2e-6, True, "", 3.0, 1.0)
    text = page(qfx.Report((row,), 1))
    assert "<b>" not in text and "<i>" not in text and "&lt;b&gt;" in text


NAMES = (
    "$",
    "a$x_{$b",
    r"\$\frac{$",
    "a\x1b[2Jb",
    "a\nb\tc",
    "\u202eabc\u2066",
    "\0",
    "\ud800",
    "é",
)


@pytest.mark.parametrize("name", NAMES)
def test_any_name_can_be_printed_and_drawn(name: str, tmp_path: Path) -> None:
    """A name is what a user chose: `$` begins no formula, nothing moves a cursor."""
    path, shown = tmp_path / "report.html", printable(name)
    row = Row(name, "n", "1x1x1", "s", "k", f"why {name}", 30.0, 1e-6, 1e-6, True, "", 3.0, 1.0)
    report = qfx.Report((row, row), 1)
    report.save_html(path)
    recipe = qfx.Recipe((qfx.SiteRecipe(name, 0, 1, 1, None, reason=name),))
    for text in (path.read_text(encoding="utf-8"), str(report), str(recipe)):
        assert all(c.isprintable() or c == "\n" for c in text)
        assert html.unescape(text).count(shown) > 1
    for chart in charts(report.rows, report.shares):
        assert shown in "".join(ElementTree.fromstring(chart.svg).itertext())


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("a\x1b[2J$", torch.nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("a\x1b[2J$")(x)


def test_names_of_modules_reach_a_plan_and_errors_printable() -> None:
    model = Named()
    _, plan = qfx.rewrite(qfx.trace(model, torch.randn(2, 8)), qfx.Config(minimum_gain=0))
    assert r"a\x1b[2J$" in str(plan) and "\x1b" not in str(plan)
    with pytest.raises(ValueError, match=r"there is: a\\x1b\[2J\$$") as raised:
        qfx.quantize_(model, qfx.Config(skip=("b",)))
    assert "\x1b" not in str(raised.value)


@pytest.mark.parametrize(
    "row",
    [
        Row("a", "n", "", "float", "", "never"),
        Row("a", "n", "1x1x1", "s", "k", "", math.inf, 1e-6, 1e-6, True, "", 0.0, 0.0),
        Row("a", "n", "1x1x1", "s", "k", "", -math.inf, 1e-6, 1e-6, True, "", math.inf, math.inf),
        Row("a", "n", "?x1x1", "s", "k", "", math.nan, 1e-6, 1e-6, True, "", math.nan, math.nan),
        Row("a" * 200, "n", "1x1x1", "s", "k", "", -20.0, 1e-9, 1.0, False, "", 1e30, 1e-30),
    ],
)
def test_every_value_can_be_drawn(row: Row) -> None:
    report = qfx.Report((row, row), 1)
    assert "</html>" in page(report)
    assert {chart.title for chart in charts(report.rows, report.shares)} <= {
        "Error", "Activations", "Time",
    }  # fmt: skip


def test_the_facts_are_those_of_the_worst_site() -> None:
    rows = (
        Row("good", "n", "1x1x1", "s", "k", "", 40.0, 3e-6, 1e-6, True, "", 4.0, 1.0),
        Row("bad", "n", "1x1x1", "s", "k", "", 20.0, 3e-6, 2e-6, True, "", 50.0, 1.0),
    )
    facts = {fact.label.split(":")[0]: (fact.value, fact.where) for fact in _facts(Report(rows, 1))}
    assert facts == {
        "matmuls in int8": ("2 of 2", ""),
        "faster": ("2.00×", ""),  # noqa: RUF001
        "lowest SQNR": ("20.0 dB", "bad"),
        "largest share of the error": ("99.0%", "bad"),
        "greatest max/rms": ("50", "bad"),
    }


def test_no_rows() -> None:
    assert "0 of 0 matmuls in int8" in page(qfx.Report((), 0))


def test_the_same_report_is_the_same_page(report: qfx.Report) -> None:
    assert page(report) == page(report)


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "qfx.report.charts")
    with pytest.raises(ImportError, match=rf'{package} is not installed: pip install "qfx\[report'):
        qfx.Report((), 0).save_html(tmp_path / "report.html")


def test_qfx_itself_needs_neither() -> None:
    code = "import sys, qfx; assert not {'matplotlib', 'qfx.report.charts'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
