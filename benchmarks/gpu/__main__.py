"""Benchmarks of qfx on one GPU: correctness, the best kernel for each shape, gains, and costs.

    python -m benchmarks.gpu [--out DIR] [--budget 520] [--skip STAGE,...] [--dry-run]

Everything ends after `budget` seconds at the latest, even if something hangs. Each figure is
written to DIR/results.jsonl as soon as it is known; a short table is printed last. Copy
DIR/measured.inc to csrc/cuda/sm90/ and the cost table DIR/<gpu>.json to qfx/cost/, both from the
same run, because the times in the table are those of these kernels. The exit status is 1 if
anything is wrong. `--dry-run` runs every stage on the CPU, with tiny sizes.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.common import machine
from benchmarks.gpu import check, cost_table, llama, lowbit, products
from benchmarks.gpu.session import Row, Session
from benchmarks.peer import reason
from qfx import _C

BUDGET = 520.0
GRACE = 5.0  # seconds that the stages leave for the table
Stage = tuple[Callable[[Session], Iterator[Row]], float]
# With their seconds, those that others build on first.
STAGES: dict[str, Stage] = {
    "kernels": (check.kernels, 120.0),
    "ceilings": (products.ceilings, 20.0),
    "sweep": (products.sweep, 75.0),
    "ratios": (products.ratios, 45.0),
    "lowbit": (lowbit.lowbit, 45.0),
    "linear": (llama.linear_both_ways, 30.0),
    "cost": (cost_table.cost_rows, 180.0),
    "model": (llama.llama, 110.0),
}


def environment(session: Session) -> Iterator[Row]:
    found = {"gpu": session.name, "architectures": _C.cuda_architectures()}
    yield {**found, "cuda": torch.version.cuda, **machine()}


def measure(session: Session, skipped: Sequence[str] = ()) -> int:
    """Runs all stages except the skipped ones, writes the files, prints the table and returns the
    exit status: 1 if a check failed or a stage ended with an error."""
    session.run("environment", environment(session), GRACE)
    for name, (stage, seconds) in STAGES.items():
        whole = session.left - GRACE
        try:
            if name not in skipped:
                session.run(name, stage(session), whole if session.dry else min(seconds, whole))
        except Exception as error:  # a defect of one stage must not cost the GPU's time for others
            where = traceback.format_exc().splitlines()[-8:]
            session.add(name, {"ok": False, "result": reason(error), "where": where})
    written = [products.write_measured(session), cost_table.write_table(session)]
    print("\n".join(f"wrote {path}" for path in written if path), flush=True)
    print(table(session), flush=True)
    return int(any(row.get("ok") is False for row in session.rows))


def table(session: Session) -> str:
    """Returns what was wrong, the speeds reached, and every ratio with its bar."""
    checks = [row["ok"] for row in session.rows if "ok" in row]
    failed = [json.dumps(row) for row in session.rows if row.get("ok") is False]
    ratios = [row for row in session.rows if "ratio" in row and row.get("way") != "bf16"]

    def of(rows: list[Row], *columns: str) -> str:
        return tabulate([[row.get(c) for c in columns] for row in rows], columns, floatfmt=".4g")

    return "\n\n".join([
        f"qfx on {session.name}: {sum(checks)} checks passed, {len(failed)} failed",
        *failed,
        of(session.of("ceilings"), "what", "kernel", "TOPS", "TB/s"),
        of(ratios, "what", "shape", "judged", "way", "ratio", "must"),
    ])  # fmt: skip


def main() -> None:
    started = time.monotonic()
    asks = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=asks)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS")
    parser.add_argument("--skip", default="", metavar="STAGE,...")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes")
    given = parser.parse_args()
    skipped = given.skip.split(",") if given.skip else []
    if unknown := [name for name in skipped if name not in STAGES]:
        parser.error(f"no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    if not given.dry_run and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here; --dry-run tests the script.")
    if not given.dry_run and not _C.cuda_architectures():
        parser.error("this qfx has no CUDA kernels; put nvcc on the PATH and build it again.")
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "results.jsonl").write_text("")
    session = Session(given.out, started + given.budget, given.dry_run)
    faulthandler.dump_traceback_later(given.budget, exit=True)  # even if something hangs
    sys.exit(measure(session, skipped))


if __name__ == "__main__":
    main()
