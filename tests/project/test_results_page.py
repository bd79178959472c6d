"""The page of results has every saved figure of every processor; a further one removes none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, results_page
from benchmarks.common import slug
from benchmarks.models import KEY

HOST = {"flags": ["avx2"], "cores": 2, "threads": 1, "torch": "2.13", "python": "3.11"}
HOST |= {"commit": "0123456789", "uncommitted_changes": False}
AMD = {"cpu": "AMD EPYC", "family_model": ["26", "2"]}
XEON = {"cpu": "Intel(R) Xeon(R) Processor", "family_model": ["6", "167"]}
PLATINUM = {"cpu": "Intel(R) Xeon(R) Platinum 8481C", "family_model": ["6", "167"]}
GRAVITON = {"cpu": "aarch64", "family_model": ["0x41", "0xd4f"]}
Row = dict[str, Any]


def _row(candidate: str, ratio: float, model: str = "bert-1x128", **other: Any) -> Row:
    figures = {"median_ms": 100 / ratio, "ratio": ratio}
    return {"model": model, "candidate": candidate, "threads": 1, **figures, **other}


def _rows(*ratios: float) -> list[Row]:
    """The baseline, then peers of these speeds, the last of them qfx."""
    names = ("torchao W8A8", "CTranslate2 int8", "qfx")[-len(ratios) :]
    rows = [_row("float32 eager", 1.0), *map(_row, names, ratios)]
    return [{**row, "commit": HOST["commit"]} for row in rows]


def _save(folder: Path, cpu: Row, rows: list[Row]) -> None:
    saved = {"machine": {**HOST, **cpu}, "rows": rows}
    (folder / f"{slug(cpu)}-models.json").write_text(json.dumps(saved))


def _page(folder: Path) -> str:
    return results_page.page(results_page.read(folder))


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


def test_a_table_names_only_processors_that_have_figures_in_it(tmp_path: Path) -> None:
    """Files of one benchmark fill several tables, and not each of them all."""
    for cpu, models in ((AMD, ("digits",)), (XEON, ("digits", "tiny"))):
        figures = {"setting": "float", "accuracy %": 96.5, "nll": 0.16, "SQNR dB": 200.0}
        rows = [{"model": m, "threads": 1, **figures} for m in models]
        saved = json.dumps({"machine": {**HOST, **cpu}, "rows": rows})
        (tmp_path / f"{slug(cpu)}-accuracy.json").write_text(saved)
    tiny = replace(
        next(
            s
            for s in results_page.SECTIONS
            if s.benchmark == "accuracy" and s.only({"model": "digits"})
        ),
        only=lambda row: row["model"] == "tiny",
        text="Tiny.",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results_page, "SECTIONS", (*results_page.SECTIONS, tiny))
        page = _page(tmp_path)
    lines = [line for line in page.splitlines() if re.match(r".*: .*threads?, commit", line)]
    assert [line.split(":")[0] for line in lines] == ["AMD 26-2", "Intel 6-167", "Intel 6-167"]


def test_figures_of_the_gpu_are_no_part_of_it(tmp_path: Path) -> None:
    _save(tmp_path, AMD, _rows(2.0))
    page = _page(tmp_path)
    (tmp_path / "nvidia-h100-80gb-hbm3-gpu.jsonl").write_text('{"part": "machine"}\n')
    assert _page(tmp_path) == page


def test_a_number_of_threads_has_columns_and_a_standing_of_its_own(tmp_path: Path) -> None:
    rows = [*_rows(3.0, 2.0), *({**row, "threads": 2} for row in _rows(3.0, 4.0))]
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


def test_a_run_on_a_new_processor_writes_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    for cpu, ratio in ((AMD, 2.0), (XEON, 3.0), (GRAVITON, 4.0), (XEON, 5.0)):
        monkeypatch.setattr(common, "machine", lambda cpu=cpu: {**HOST, **cpu})
        common.merge("models", _rows(ratio), KEY)
    speeds = {text for way, _, text in _figures(_page(tmp_path)) if way == "qfx"}
    assert speeds == {"2.00x", "5.00x", "4.00x"}


def test_processors_of_arm_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their `/proc/cpuinfo` has neither a family nor a model."""
    known = {"CPU implementer": "0x41", "CPU part": "0xd4f", "Features": "asimddp i8mm"}
    monkeypatch.setattr(common, "_cpuinfo", lambda: known)
    assert common.machine()["family_model"] == ["0x41", "0xd4f"]
