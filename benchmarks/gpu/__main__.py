"""Benchmarks of qfx on one GPU: correctness, peak speed, the best kernel for each shape, and gains.

    python -m benchmarks.gpu [--out DIR] [--budget 520] [--skip STAGE,...] [--dry-run]

Everything ends after `budget` seconds at the latest, even if something hangs. Each figure is
written to DIR/results.jsonl as soon as it is known; a short table is printed last. Copy
DIR/measured.inc to csrc/cuda/sm90/ and the cost table DIR/<gpu>.json to qfx/cost/, both from the
same run, because the times in the table are those of these kernels. The exit status is 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.common import ROOT, machine
from benchmarks.gpu import ceilings, correctness, cost_table, llama, ratios, summary, sweep
from benchmarks.gpu.session import Row, Session
from qfx import _C

BUDGET = 520.0
GRACE = 5.0  # seconds that the stages leave for the table
Stage = tuple[str, Callable[[Session], Iterator[Row]], float]
# With their seconds, those that others build on first.
STAGES: tuple[Stage, ...] = (
    ("cpu", correctness.on_cpu, 45.0),
    ("kernels", correctness.of_kernels, 120.0),
    ("ceilings", ceilings.ceilings, 20.0),
    ("sweep", sweep.sweep, 75.0),
    ("ratios", ratios.ratios, 45.0),
    ("linear", llama.linear_both_ways, 30.0),
    ("cost", cost_table.cost_rows, 180.0),
    ("model", llama.llama, 110.0),
    ("sanitizer", correctness.sanitized, 30.0),
)


def environment(session: Session) -> Iterator[Row]:
    found: Row = {"gpu": session.name, "architectures": _C.cuda_architectures()}
    if not session.dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {"capability": f"{properties.major}.{properties.minor}",
                  "multiprocessors": properties.multi_processor_count,
                  "memory_GiB": properties.total_memory / 2**30,
                  "cuda": torch.version.cuda}  # fmt: skip
    yield {**found, **machine()}


def unusable() -> str | None:
    """Returns why nothing can be measured here, in one sentence, or None."""
    if not torch.cuda.is_available():
        return "python -m benchmarks.gpu: PyTorch sees no GPU here; --dry-run tests the script."
    if not _C.cuda_architectures():
        return (
            "python -m benchmarks.gpu: this qfx was built without CUDA kernels; put nvcc on the "
            "PATH and build it again."
        )
    return None


def build_if_possible() -> None:
    """Builds the CUDA kernels if they are missing and nvcc is available, then starts this program
    again."""
    if _C.cuda_architectures() or not torch.cuda.is_available() or shutil.which("nvcc") is None:
        return
    if "QFX_GPU_BUILT" in os.environ:
        return
    print("building the CUDA kernels", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, "-C", "cmake.define.QFX_CUDA=ON", "-e", "."], cwd=ROOT, check=False)
    os.environ["QFX_GPU_BUILT"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:]])


def stop_at(session: Session) -> None:
    """Starts a timer that prints the table and ends the process when the budget is used up, even if
    something hangs."""

    def stop() -> None:
        session.add("stopped", {"why": "the budget was used up"})
        print(summary.table(session), flush=True)
        os._exit(1)

    timer = threading.Timer(max(session.left, 0.0), stop)
    timer.daemon = True
    timer.start()


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS")
    parser.add_argument("--skip", type=_stages, default=[], metavar="STAGE,...")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes")
    given = parser.parse_args()
    if not given.dry_run:
        build_if_possible()
    why_not = None if given.dry_run else unusable()
    if why_not is not None:
        sys.exit(why_not)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "results.jsonl").write_text("")
    session = Session(given.out, started + given.budget, given.dry_run)
    stop_at(session)
    sys.exit(measure(session, given.skip))


def _stages(text: str) -> list[str]:
    names = text.split(",")
    known = [name for name, *_ in STAGES]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no stage {unknown[0]!r}; there are {', '.join(known)}")
    return names


def _why(error: BaseException) -> str:
    """Returns the first lines of an exception and of its cause, which Dynamo mentions last."""
    text = f"{type(error).__name__}: {error}".splitlines()[:4]
    return " ".join(text) + (f" <- {_why(error.__cause__)}" if error.__cause__ else "")


def measure(session: Session, skipped: Sequence[str] = ()) -> int:
    """Runs all stages except the skipped ones, writes the files, prints the table and returns the
    exit status."""
    session.run("environment", environment(session), GRACE)
    for name, stage, seconds in STAGES:
        if name in skipped:
            continue
        if session.left < GRACE:
            session.add(name, {"why": "skipped: no time was left"})
            continue
        try:
            whole = session.left - GRACE
            session.run(name, stage(session), whole if session.dry else min(seconds, whole))
        except Exception as error:  # a defect of one stage must not cost the GPU's time for others
            where = traceback.format_exc().splitlines()[-8:]
            session.add(name, {"ok": False, "result": _why(error), "where": where})
    written = [sweep.write_measured(session), cost_table.write_table(session)]
    print("\n".join(f"wrote {path}" for path in written if path), flush=True)
    print(summary.table(session), flush=True)
    return summary.wrong(session)


if __name__ == "__main__":
    main()
