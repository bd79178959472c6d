"""The page of results has every saved figure of every processor; a further one removes none."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, results_page
from benchmarks.common import slug
from benchmarks.results_age import OLD, TODAY, UNKNOWN, Age
from benchmarks.results_cells import filled

HOST = {"flags": ["avx2"], "cores": 2, "threads": 1, "torch": "2.13", "python": "3.11"}
HOST |= {"commit": "0123456789", "uncommitted_changes": False}
AMD = {"cpu": "AMD EPYC", "family_model": ["26", "2"]}
XEON = {"cpu": "Intel(R) Xeon(R) Processor", "family_model": ["6", "167"]}
PLATINUM = {"cpu": "Intel(R) Xeon(R) Platinum 8481C", "family_model": ["6", "167"]}
GRAVITON = {"cpu": "aarch64", "family_model": ["0x41", "0xd4f"]}
Row = dict[str, Any]


def _row(candidate: str, ratio: float, **other: Any) -> Row:
    figures = {"median_ms": 100 / ratio, "ratio": ratio, "threads": 1, "commit": HOST["commit"]}
    return {"model": "bert-1x128", "candidate": candidate, **figures, **other}


def _rows(*ratios: float, **other: Any) -> list[Row]:
    """The baseline, then peers of these speeds, the last of them qfx."""
    names = ("torchao W8A8", "CTranslate2 int8", "qfx")[-len(ratios) :]
    found = zip(("float32 eager", *names), (1.0, *ratios), strict=True)
    return [_row(name, ratio, **other) for name, ratio in found]


def _save(folder: Path, cpu: Row, rows: list[Row], name: str = "models") -> None:
    saved = {"machine": {**HOST, **cpu}, "rows": rows}
    (folder / f"{slug(cpu)}-{name}.json").write_text(json.dumps(saved))


def _page(folder: Path, age: Age = TODAY) -> str:
    return results_page.page(results_page.read(folder), age)


def _figures(page: str) -> set[tuple[str, str, str]]:
    """Way, processor and text of every filled cell of the table of bert-1x128."""
    text = page.split("### bert-1x128\n")[1].split("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text]
    return {(row[0], c, t) for row in rows for c, t in zip(head[1:], row[1:], strict=True) if t}


def test_a_further_processor_adds_figures_and_removes_none(tmp_path: Path) -> None:
    """Also where it shares the short name of another, and where it has other peers."""
    before: set[tuple[str, str, str]] = set()
    ratios = {1.5: AMD, 2.5: XEON, 3.5: GRAVITON}
    for ratio, cpu in ratios.items():
        _save(tmp_path, cpu, _rows(*[3.0, 2.0][: len(before) // 2], ratio))
        after = _figures(_page(tmp_path))
        assert before < after
        assert {f"{r:.2f}x" for r in ratios if r <= ratio} <= {text for _, _, text in after}
        before = after
    processors = {"AMD 26-2, 1 thread", "Intel 6-167, 1 thread", "aarch64 0x41-0xd4f, 1 thread"}
    assert {column for _, column, _ in before} == processors
    _save(tmp_path, PLATINUM, _rows(4.5))
    texts = sorted(text for _, _, text in before)
    assert sorted(t for _, c, t in _figures(_page(tmp_path)) if "Platinum" not in c) == texts
    names = {c for _, c, _ in _figures(_page(tmp_path)) if c.startswith("Intel")}
    assert names == {f"{cpu['cpu']} 6-167, 1 thread" for cpu in (XEON, PLATINUM)}


def test_a_row_that_no_table_shows_is_an_error(tmp_path: Path) -> None:
    figures = {"setting": "float", "accuracy %": 96.5, "nll": 0.16, "SQNR dB": 200.0}
    _save(tmp_path, AMD, [{"model": "digits", **figures}], "accuracy")
    text = _page(tmp_path)
    assert "| float | 96.50 % | 0.1600 |" in text  # without the SQNR of an exact result
    assert text.count("Not measured yet.") > 10
    _save(tmp_path, XEON, [{"model": "tiny", **figures}], "accuracy")
    with pytest.raises(ValueError, match=r"does not show \('accuracy', .*'tiny'"):
        _page(tmp_path)


def test_a_number_of_threads_has_columns_and_a_standing_of_its_own(tmp_path: Path) -> None:
    rows = [*_rows(3.0, 2.0), *_rows(3.0, 4.0, threads=2)]
    rows.append({**_row("llama.cpp Q8_0", 1.0), "reason": "It is for language models."})
    _save(tmp_path, AMD, rows)
    page = _page(tmp_path)
    assert {("qfx", "AMD 26-2, 1 thread", "2.00x"), ("qfx", "AMD 26-2, 2 threads", "4.00x")} < (
        _figures(page)
    )
    assert ("llama.cpp Q8_0", "AMD 26-2, 1 thread", "not run") in _figures(page)
    lines = re.findall("^- (.*)$", page, re.MULTILINE)
    assert lines == [
        "AMD 26-2, 1 thread: qfx compiled: 2nd of 3, 1.50x the first (CTranslate2 int8).",
        "AMD 26-2, 1 thread: no llama.cpp Q8_0: It is for language models.",
        "AMD 26-2, 2 threads: qfx compiled: first of 3.",
    ]


def test_a_figure_never_stands_in_the_place_of_another(tmp_path: Path) -> None:
    _save(tmp_path, AMD, [*_rows(2.0), _row("qfx", 3.0, commit="other")])
    with pytest.raises(ValueError, match=r"two figures for 'qfx' of .*'2\.00x' and '3\.00x \*'"):
        _page(tmp_path)


def test_processors_of_arm_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their `/proc/cpuinfo` has neither a family nor a model."""
    known = {"CPU implementer": "0x41", "CPU part": "0xd4f", "Features": "asimddp i8mm"}
    monkeypatch.setattr(common, "_cpuinfo", lambda: known)
    assert common.machine()["family_model"] == ["0x41", "0xd4f"]


def test_a_cell_leaves_out_what_the_row_lacks() -> None:
    row = {"us": 99.5, "dB, exact": 120.0, "gain": None, "x - y": 0.0015}
    assert filled(["{us:us}", "{dB, exact:db} dB", "{gain:.1f}x", "{peak} %"], row) == "99.5 us"
    assert filled("{x - y:thousandths}", row) == "1.500" and filled("{peak} %", row) is None


# --- figures that are older than their code ---


def _commit(root: Path, file: str, text: str) -> str:
    """Commits a file and returns the commit's name."""
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root)]
    for command in (["add", "."], ["commit", "-qm", "one"], ["rev-parse", "HEAD"]):
        done = subprocess.run([*git, *command], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository without commits."""
    subprocess.run(["git", "init", "-q", str(tmp_path / "root")], check=True)
    return tmp_path / "root"


def test_a_newer_commit_of_the_measured_code_marks_the_figures(root: Path, tmp_path: Path) -> None:
    """And no commit of other files does."""
    before = _commit(root, "csrc/cpu/gemm/gemm.h", "int a;")
    _save(tmp_path, AMD, _rows(2.0, commit=before))
    _commit(root, "docs/page.md", "words")
    assert f"commit {before[:8]}." in _page(tmp_path, Age(root))
    now = _commit(root, "csrc/cpu/gemm/gemm.h", "int a;  // a comment counts")
    marked = _page(tmp_path, Age(root))
    assert f"commit {before[:8]}{OLD}." in marked
    _save(tmp_path, AMD, [*_rows(2.0, commit=before), _row("qfx exported", 3.0, commit=now)])
    listed = ", ".join(sorted([f"{before[:8]}{OLD}", now[:8]]))
    assert f"commit {listed}." in _page(tmp_path, Age(root))


@pytest.mark.parametrize("place", ["no repository", "an unknown commit"])
def test_the_page_says_where_it_cannot_tell(place: str, root: Path, tmp_path: Path) -> None:
    _commit(root, "csrc/cpu/gemm/gemm.h", "int a;")
    _save(tmp_path, AMD, _rows(2.0))
    age = Age(root if place == "an unknown commit" else tmp_path)
    assert f"commit {HOST['commit'][:8]}{UNKNOWN}." in _page(tmp_path, age)
