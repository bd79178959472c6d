"""A survey of `transformers`: does qfx find every linear, and how exact are results and gradients?

Each architecture of `benchmarks/zoo.py` runs in a process of its own, so that a crash or the time
limit ends one row, not the survey. Rows saved at the same commit are kept, not run again.
    python -m benchmarks.architectures --save     # an hour on two cores; --inner aot_eager: minutes
    python -m benchmarks.architectures --dynamic --inner aot_eager --save    # with symbolic sizes
    python -m benchmarks.architectures --page     # docs/architectures.md from the saved results
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.common import RESULTS, ROOT, machine
from benchmarks.measures import PARTS, Row
from benchmarks.survey_page import lost, missed, page, printed, printed_dynamic
from benchmarks.symbolic import symbolic
from benchmarks.zoo import TABLE, build
from qfx.io.atomic_write import write_text
from qfx.values.config import INNER

RESULT = RESULTS / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"


# --- the survey ---


def one(name: str, inner: str, dynamic: bool) -> None:
    """Measures one architecture in the subprocess and prints a line of JSON after each part."""
    if dynamic:
        print(json.dumps(symbolic(TABLE[name], inner)), flush=True)
        return
    for part in PARTS:
        print(json.dumps(part(*build(TABLE[name]), inner)), flush=True)


def measured(name: str, options: argparse.Namespace) -> Row:
    """Returns the row of one architecture; `failure` says what stopped it, if anything did."""
    command = [sys.executable, "-m", "benchmarks.architectures", "--one", name]
    command += ["--inner", options.inner, *(["--dynamic"] if options.dynamic else [])]
    limit_s = options.limit
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    start, failure = time.perf_counter(), ""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s
        )
        printed, failure = done.stdout, cause(done.stderr) if done.returncode else ""
    except subprocess.TimeoutExpired as stopped:
        printed = (stopped.stdout or b"").decode()
        failure = f"stopped after {limit_s:.0f} s"
    row: Row = {"architecture": name, "kind": TABLE[name].kind, "model": TABLE[name].model}
    for line in printed.splitlines():
        row.update(json.loads(line))
    return {**row, "failure": failure, "seconds": round(time.perf_counter() - start)}


def cause(stderr: str) -> str:
    """Returns the last line that names an exception, without details that differ from run to
    run."""
    lines = [line for line in stderr.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return re.sub(r"0x\w+", "0x", lines[-1])[:200] if lines else "killed"


def survey(options: argparse.Namespace) -> list[Row]:
    """Returns the requested rows. With `save`, they replace those of the same names in the
    results."""
    host = {**machine(), "transformers": version("transformers")}
    origin = {"commit": host["commit"], "inner": options.inner}
    table = "dynamic" if options.dynamic else "static"
    rows = {row["architecture"]: row for row in saved(table)["rows"]}
    todo = [n for n in options.only if n not in rows or not current(rows[n], origin)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda n: measured(n, options), todo):
            rows[row["architecture"]] = {**row, **origin}
            print(json.dumps(row), flush=True)
            if options.save:
                save(table, host, [rows[name] for name in TABLE if name in rows])
    return [rows[name] for name in options.only]


def current(row: Row, origin: Row) -> bool:
    return not row["failure"] and all(row[key] == value for key, value in origin.items())


def saved(table: str = "static") -> dict[str, Any]:
    """Returns the machine and the rows of a table, `static` or `dynamic`."""
    return _all().get(table, {"rows": []})


def _all() -> dict[str, Any]:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def save(table: str, host: Row, rows: list[Row]) -> None:
    """Writes the rows of a table, each on a line of its own."""
    tables = {**_all(), table: {"machine": host, "rows": rows}}
    texts = []
    for name, found in tables.items():
        lines = ",\n".join(json.dumps(row) for row in found["rows"])
        texts.append(
            f'"{name}": {{"machine": {json.dumps(found["machine"])},\n"rows": [\n{lines}\n]}}'
        )
    write_text(RESULT, "{" + ",\n".join(texts) + "}\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inner", choices=INNER, default="inductor")
    parser.add_argument("--dynamic", action="store_true", help="with symbolic sizes")
    parser.add_argument("--only", type=lambda s: s.split(","), default=list(TABLE))
    parser.add_argument("--limit", type=float, default=600, help="seconds for one architecture")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--page", action="store_true", help="write docs/architectures.md and stop")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    if options.one:
        one(options.one, options.inner, options.dynamic)
    elif options.page:
        write_text(PAGE, page(saved(), saved("dynamic")))
    else:
        rows = survey(options)
        cells, short = (printed_dynamic, lost) if options.dynamic else (printed, missed)
        print(tabulate([cells(row) for row in rows], headers="keys"))
        print("\n".join(f"{r['architecture']}: {'; '.join(short(r))}" for r in rows if short(r)))


if __name__ == "__main__":
    main()
