"""benchmarks.gpu where there is no GPU: stages with tiny sizes on the CPU; its limits."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import check, cost_table, llama, products
from benchmarks.gpu import session as sessions
from benchmarks.gpu.session import Session
from qfx.cost.gpu import GpuCost
from qfx.ops.forms import form_of
from qfx.values.scheme import QSpec, Scheme
from tests.cuda import emulator as cuda_emulator

ROOT = Path(__file__).resolve().parents[2]


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path, time.monotonic() + 3600, dry=True)


def test_every_stage_runs_dry(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the models, and kernels not in processes."""
    right = {"ok": True, "cases": 8}
    monkeypatch.setattr(check, "checked", lambda *_: right)
    assert command.measure(session, ["model"]) == 0
    assert {row["stage"] for row in session.rows} == {"environment", *command.STAGES} - {"model"}
    assert not [row for row in session.rows if "why" in row]  # nothing was cut short
    assert _rows(session.out) == session.rows and "128x128x128" in command.table(session)
    (path,) = session.out.glob("*.json")
    model = GpuCost.read(path.read_text())
    for dtype in cost_table.DTYPES:
        assert model.lacks("products", dtype, None) is None
        for scheme in (Scheme(rotation=64), Scheme(x=None), Scheme(w=QSpec(bits=4, group=64))):
            assert model.lacks(form_of(scheme).name, dtype, scheme) is None
    (point,) = [
        row["s"] for row in session.of("cost") if row["what"] == "int8"
        and row["sizes"] == [16, 128, 64] and row["dtype"] == "float16"
    ]  # fmt: skip
    found = model.tables["float16"].grids["int8"].logs(16, 128, 64)
    assert found == pytest.approx(point, rel=1e-3)


def test_a_model_has_a_row_for_each_way(session: Session) -> None:
    """Of prefill, then of a decode step; bfloat16 first."""
    rows = [*itertools.islice(llama.llama(session), 7)]
    for what, length in (("prefill", 16), ("decode", 1)):
        first, *others = [row for row in rows if row["what"] == what][: len(llama.WAYS[what])]
        assert (first["way"], first["ratio"], first["relative_error"]) == ("bf16", 1, 0)
        assert [row["way"] for row in others] == [*llama.WAYS[what]][1:]
        assert first["shape"][1:] == [length, 64]
        assert all(row["relative_error"] < 0.1 for row in others)
        assert others[-1]["relative_error"] > 0  # which quantizes every matmul


def test_a_kernel_is_checked_in_a_process(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny shapes of the portable kernel; one that crashes says so, one that hangs is ended."""
    shapes = len(list(itertools.product(*check.TINY)))
    expected = {"ok": True, "cases": shapes, "wrong": 0, "first": []}
    assert check.checked(session, "s8", check.PORTABLE) == expected
    crashed = check.checked(session, "s9", check.PORTABLE)
    assert crashed["ok"] is False and "KeyError: 's9'" in crashed["result"]
    monkeypatch.setattr(Session, "left", 0.1)
    assert check.checked(session, "s8", "portable")["result"] == "stopped after 0 s"


def test_a_kernel_that_is_wrong_is_not_timed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"ok": False, "cases": 4, "wrong": 1, "first": ["2x1x1: 1 sums differ"]}
    monkeypatch.setattr(check, "checked", lambda *_: row)
    monkeypatch.setattr(command, "STAGES", {"kernels": (check.kernels, 5.0)})
    assert command.measure(session) == 1
    assert check.right(session, "s8") == []
    assert "2 failed" in command.table(session) and "2x1x1" in command.table(session)


def test_without_a_gpu_it_says_so_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit):
        command.main()
    said = capsys.readouterr().err
    assert "python -m benchmarks.gpu: error: PyTorch sees no GPU here; --dry-run tests" in said


ENDLESS = """
import sys, time
from benchmarks.gpu import __main__ as command
def stage(session):
    yield {"what": "begun"}
    while True:
        time.sleep(1)
command.STAGES, command.GRACE = {"endless": (stage, 3600.0)}, 0.0
sys.argv[1:] = ["--dry-run", "--out", sys.argv[1], "--budget", "1"]
command.main()
"""


def test_it_stops_where_its_budget_ends(tmp_path: Path) -> None:
    """Within a stage too, which may never give a row again: those before are in the file."""
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 1 and "Timeout" in done.stderr, done.stderr
    assert _rows(tmp_path)[0]["stage"] == "environment"


def test_a_stage_that_takes_too_long_is_cut(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second whenever somebody looks at it."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr(sessions, "time", clock)
    session.run("endless", ({"what": "more"} for _ in itertools.count()), 10.0)
    assert session.rows[-1]["cut_after_s"] == 10 and 5 < len(session.rows) < 15


def test_a_defect_of_a_stage_does_not_cost_the_others(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(session: Session) -> Any:
        yield {"what": "begun"}
        raise KeyError("a name")

    stages = {"first": (defect, 5.0), "second": (lambda session: iter([{"what": "done"}]), 5.0)}
    monkeypatch.setattr(command, "STAGES", stages)
    assert command.measure(session) == 1
    assert [row.get("what") for row in session.of("first") + session.of("second")] == [
        "begun", None, "done",
    ]  # fmt: skip
    assert session.of("first")[1]["result"] == "KeyError: 'a name'"


def test_a_kernel_is_compared_with_exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = check.Weight.of("s8", 24, 48, "cpu")
    assert check.products(weight, 5, "cpu") == []
    names = ("int8_mm", "linear")
    given = SimpleNamespace(**{name: getattr(torch.ops.qfx, name) for name in names})
    given.int8_mm = lambda *operands: torch.ops.qfx.int8_mm(*operands) + 1
    monkeypatch.setattr(check, "OPS", given)
    assert check.products(weight, 5, "cpu") == ["120 sums differ"]


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        (1, ["portable", *(f"s8_swap{n}/{s}" for n in (16, 8) for s in (1, 2, 4))]),
        (1024, ["portable", *(f"{n}/1" for n in ("s8_128x256", "s8_128x256x2", "s8_128x128",
         "s8_swap128", "s8_swap64"))]),
        (4096, ["portable", *(f"s8_{n}/1" for n in ("128x256", "128x256x2", "128x128"))]),
    ],
)  # fmt: skip
def test_what_is_timed_for_a_number_of_rows(m: int, expected: list[str]) -> None:
    assert check.choices(["portable", *check.named("s8")], m) == expected


def test_the_swept_rows_become_source(session: Session) -> None:
    session.add("sweep", {"operands": "s8", "m": 1, "k": 4096, "n": 64, "best": "s8_swap8/4"})
    session.add("sweep", {"operands": "b1", "m": 300, "k": 4100, "n": 8, "best": "portable"})
    session.add("sweep", {"operands": "s8", "m": 256, "k": 64, "n": 64, "best": None})
    lines = products.write_measured(session).read_text().splitlines()
    assert lines == [
        '{"a dry run on the CPU", sm90::Operands::kCodes, {1, 1, 64, 4096}, {"s8_swap8", 4}},',
        '{"a dry run on the CPU", sm90::Operands::kBits, {1, 300, 8, 513}, {"portable", 1}},',
    ]
    own = (ROOT / "csrc/cuda/sm90/measured.inc").read_text().splitlines()
    shapes = [re.sub(r'"[^"]*"|k[A-Z]\w+|\d+', "_", line) for line in (lines[0], *own)]
    assert shapes[0] in shapes[1:]  # the form that is compiled
    assert products.nearest(session, 200, 64, 64) == "s8_swap8/4"


@pytest.mark.parametrize("kernel", ["portable", "s8_swap16", "b1_128x256"])
def test_the_check_forces_each_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the CUDA operators, on the emulator."""
    cuda_emulator.library()
    cuda_emulator.emulate(90)
    monkeypatch.setattr(check, "OPS", cuda_emulator.OPS)
    operands = "b1" if kernel.startswith("b1") else "s8"
    weight = check.Weight.of(operands, 24, 144, "cpu")
    with check.forced(kernel):
        assert check.CHECKS[operands](weight, 17, "cpu") == []
    with check.forced("s8_none"), pytest.raises(RuntimeError, match="there is no such kernel"):
        check.CHECKS[operands](weight, 17, "cpu")
