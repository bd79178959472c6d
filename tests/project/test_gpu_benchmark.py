"""benchmarks.gpu where there is no GPU: every stage with tiny sizes on the CPU; its limits."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import check, correctness, cost_table, kernels, peak, summary, sweep
from benchmarks.gpu import session as sessions
from benchmarks.gpu.session import Session
from qfx.cost.gpu import GpuCost
from qfx.ops.forms import form_of
from qfx.values.scheme import QSpec, Scheme
from tests.cuda import emulator as cuda_emulator
from tests.cuda import objects as cuda_objects

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.gpu"]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Where there is no GPU, even on a machine that has one."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [*COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=3600)


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path, time.monotonic() + 3600, dry=True)


def test_a_dry_run_goes_through_every_stage(tmp_path: Path) -> None:
    done = _run("--dry-run", "--out", str(tmp_path), "--budget", "3000")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = _rows(tmp_path)
    assert {row["stage"] for row in rows} == {"environment", *(name for name, *_ in command.STAGES)}
    assert not [row for row in rows if "why" in row]  # nothing was cut short
    ways = {(row["what"], row["way"]) for row in rows if row["stage"] == "model"}
    assert len(ways) == 11 and "128x128x128" in done.stdout
    (path,) = tmp_path.glob("*.json")
    model = GpuCost.read(path.read_text())
    for dtype in cost_table.DTYPES:
        assert model.lacks("products", dtype, None) is None
        for scheme in (Scheme(rotation=64), Scheme(x=None), Scheme(w=QSpec(bits=4, group=64))):
            assert model.lacks(form_of(scheme).name, dtype, scheme) is None
    (point,) = [
        row["s"] for row in rows if row["stage"] == "cost" and row["what"] == "int8"
        and row["sizes"] == [16, 128, 64] and row["dtype"] == "float16"
    ]  # fmt: skip
    found = model.tables["float16"].grids["int8"].logs(16, 128, 64)
    assert found == pytest.approx(point, rel=1e-3)


def test_without_a_gpu_it_says_so_in_a_sentence() -> None:
    done = _run()
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("python -m benchmarks.gpu: PyTorch sees no GPU here")
    assert done.stderr.count("\n") == 1


ENDLESS = """
import sys, time
from benchmarks.gpu import __main__ as command
def stage(session):
    yield {"what": "begun"}
    while True:
        time.sleep(1)
command.STAGES, command.GRACE = (("endless", stage, 3600.0),), 0.0
sys.argv[1:] = ["--dry-run", "--out", sys.argv[1], "--budget", "1"]
command.main()
"""


def test_it_stops_where_its_budget_ends(tmp_path: Path) -> None:
    """Within a stage too, which may never give a row again."""
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    whys = [row["why"] for row in _rows(tmp_path) if "why" in row]
    assert any(word in why for why in whys for word in ("time", "budget"))
    assert "checks passed" in done.stdout, done.stderr


def test_stages_can_be_skipped(tmp_path: Path) -> None:
    others = ",".join(name for name, *_ in command.STAGES if name != "ceilings")
    done = _run("--dry-run", "--out", str(tmp_path), "--skip", others)
    assert done.returncode == 0, done.stderr
    assert {row["stage"] for row in _rows(tmp_path)} == {"environment", "ceilings"}
    done = _run("--skip", "ceilings,nothing")
    assert "no stage 'nothing'; there are cpu, kernels, ceilings" in done.stderr


def test_a_stage_that_takes_too_long_is_cut(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second whenever somebody looks at it."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr(sessions, "time", clock)
    session.run("endless", ({"what": "more"} for _ in itertools.count()), 10.0)
    assert session.rows[-1]["cut_after_s"] == 10 and 5 < len(session.rows) < 15
    assert _rows(session.out) == session.rows


def test_a_kernel_that_hangs_costs_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert correctness._within(hanging, 0.5) is None


CRASH = "import sys; print('no kernel image', file=sys.stderr); sys.exit(3)"
WRONG_ROW = {"cases": 4, "wrong": 1, "first": ["2x1x1: 1 sums differ"]}
WRONG = f"import sys; print({json.dumps(WRONG_ROW)!r}); sys.exit(1)"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (CRASH, {"ok": False, "result": "exit status 3: no kernel image"}),
        (WRONG, {"ok": False, **WRONG_ROW}),
    ],
)
def test_a_kernel_that_is_wrong_is_not_timed(
    script: str, expected: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correctness, "_check", lambda operands: [sys.executable, "-c", script])
    session.run("kernels", correctness.of_kernels(session), 60)
    s8, _ = session.rows
    assert s8 == {"stage": "kernels", "operands": "s8", "kernel": "portable", **expected}
    assert correctness.right(session, "s8") == []
    assert summary.wrong(session) == 1
    assert "2 failed" in summary.table(session)


def test_a_kernel_is_compared_with_exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = check.Weight.of("s8", 24, 48, "cpu")
    assert check.products(weight, 5, "cpu") == []
    exact = check.OPS.int8_mm
    off_by_one = lambda *operands: exact(*operands) + 1  # noqa: E731
    monkeypatch.setattr(check, "OPS", _Replaced(int8_mm=off_by_one))
    assert check.products(weight, 5, "cpu") == ["120 sums differ"]


class _Replaced:
    def __init__(self, **operators: Any) -> None:
        self.operators = operators

    def __getattr__(self, name: str) -> Any:
        return self.operators.get(name) or getattr(torch.ops.qfx, name)


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
    assert kernels.choices(["portable", *kernels.named("s8")], m) == expected


def test_the_swept_rows_become_source(session: Session) -> None:
    session.add("sweep", {"operands": "s8", "m": 1, "k": 4096, "n": 64, "best": "s8_swap8/4"})
    session.add("sweep", {"operands": "b1", "m": 300, "k": 4100, "n": 8, "best": "portable"})
    session.add("sweep", {"operands": "s8", "m": 256, "k": 64, "n": 64, "best": None})
    assert sweep.write_measured(session).read_text().splitlines() == [
        '{"a dry run on the CPU", sm90::Operands::kCodes, {1, 1, 64, 4096}, {"s8_swap8", 4}},',
        '{"a dry run on the CPU", sm90::Operands::kBits, {1, 300, 8, 513}, {"portable", 1}},',
    ]
    assert sweep.nearest(session, 200, 64, 64) == "s8_swap8/4"


def test_the_swept_rows_compile(session: Session) -> None:
    for operands, k in (("s8", 4096), ("b1", 4100)):
        row = {"operands": operands, "m": 1, "k": k, "n": 64, "best": f"{operands}_swap16/2"}
        session.add("sweep", row)
    (session.out / "cuda" / "sm90").mkdir(parents=True)
    sweep.write_measured(session).rename(session.out / "cuda" / "sm90" / "measured.inc")
    folders = (session.out, ROOT / "csrc", Path(torch.__file__).parent / "include")
    given = [f"-I{folder}" for folder in folders]
    compiler = ["c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", *given]
    command = [*compiler, str(ROOT / "csrc" / "cuda" / "sm90" / "choice.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_peak_of_instructions_is_one_of_instructions(tmp_path: Path) -> None:
    """Hopper's, without a spill, in a library that loads."""
    if shutil.which("nvcc") is None:
        pytest.skip("peak.cu is not compiled here: no nvcc on the PATH")
    library = peak.build(tmp_path)
    assert set(cuda_objects.memory_of_kernels(library).values()) == {0}
    names = cuda_objects.instructions_of(library, "90a")
    assert {n.partition(".")[0] for n in names} >= {"IGMMA", "BGMMA"}
    loaded = ctypes.CDLL(str(library))
    loaded.peak_multiplies.restype = ctypes.c_double
    of_codes, of_bits = (loaded.peak_multiplies(o, 132, 10) for o in (b"s8", b"b1"))
    assert (of_codes, of_bits) == (132 * 10 * 2 * 64 * 256 * 128, 8 * of_codes)


def test_a_defect_of_a_stage_does_not_cost_the_others(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(session: Session) -> Any:
        yield {"what": "begun"}
        raise KeyError("a name")

    stages = (("first", defect, 5.0), ("second", lambda session: iter([{"what": "done"}]), 5.0))
    monkeypatch.setattr(command, "STAGES", stages)
    assert command.measure(session) == 1
    assert [row.get("what") for row in session.of("first") + session.of("second")] == [
        "begun", None, "done",
    ]  # fmt: skip
    assert session.of("first")[1]["result"] == "KeyError: 'a name'"


@pytest.mark.parametrize("kernel", ["portable", *kernels.named("s8"), *kernels.named("b1")])
def test_the_check_forces_each_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the CUDA operators, on the emulator."""
    cuda_emulator.library()
    cuda_emulator.emulate(90)
    monkeypatch.setattr(check, "OPS", cuda_emulator.OPS)
    operands = "b1" if kernel.startswith("b1") else "s8"
    weight = check.Weight.of(operands, 24, 144, "cpu")
    with kernels.forced(kernel):
        assert check.CHECKS[operands](weight, 17, "cpu") == []
    with kernels.forced("s8_none"), pytest.raises(RuntimeError, match="there is no such kernel"):
        check.CHECKS[operands](weight, 17, "cpu")
