"""A survey of `transformers`: does qfx find every linear, and how exact are results and gradients?

Each architecture of `benchmarks/zoo.py` runs in a process of its own, so that a crash or the time
limit ends one row, not the survey. Rows saved at the same commit are kept, not run again.
    python -m benchmarks.architectures --save     # an hour on two cores; --inner aot_eager: minutes
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
from benchmarks.measures import COSINE_BAR, PARTS, SQNR_BAR, Row
from benchmarks.zoo import TABLE, build
from qfx.atomic_write import write_text
from qfx.config import INNER

RESULT = RESULTS / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"
# Why a row misses a bar: the page needs one for each such row.
ROUTING = (
    "random routers score experts nearly alike, so that errors send single tokens to another expert"
)
NOTES = {
    **dict.fromkeys(("mixtral", "qwen2-moe", "olmoe", "gpt-oss"), ROUTING),
    "clip": "its four outputs are cosines near 0, small differences of large numbers",
    "qwen3-next": "its linear attention multiplies errors; float with white noise does as badly",
}


# --- the survey ---


def one(name: str, inner: str) -> None:
    """In the subprocess: a line of JSON after each part."""
    for part in PARTS:
        print(json.dumps(part(*build(TABLE[name]), inner)), flush=True)


def measured(name: str, inner: str, limit_s: float) -> Row:
    """The row of one architecture; `failure` says what stopped it, if anything did."""
    command = [sys.executable, "-m", "benchmarks.architectures", "--one", name, "--inner", inner]
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
    """The last line that names an exception, without what differs from run to run."""
    lines = [line for line in stderr.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return re.sub(r"0x\w+", "0x", lines[-1])[:200] if lines else "killed"


def survey(options: argparse.Namespace) -> list[Row]:
    """The rows asked for; with `save`, they replace those of the same names in the results."""
    host = {**machine(), "transformers": version("transformers")}
    origin = {"commit": host["commit"], "inner": options.inner}
    rows = {row["architecture"]: row for row in saved()["rows"]}
    todo = [n for n in options.only if n not in rows or not current(rows[n], origin)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda n: measured(n, options.inner, options.limit), todo):
            rows[row["architecture"]] = {**row, **origin}
            print(json.dumps(row), flush=True)
            if options.save:
                save(host, [rows[name] for name in TABLE if name in rows])
    return [rows[name] for name in options.only]


def current(row: Row, origin: Row) -> bool:
    return not row["failure"] and all(row[key] == value for key, value in origin.items())


def saved() -> dict[str, Any]:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}


def save(host: Row, rows: list[Row]) -> None:
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_text(RESULT, f'{{"machine": {json.dumps(host)},\n"rows": [\n{lines}\n]}}\n')


# --- the page ---

HEAD = """\
# Architectures
What qfx does with {count} architectures of `transformers` {transformers}: small configurations,
random weights, no dropout; one thread, torch {torch}, `minimum_gain` 0, inner compiler {inner},
commit {commit}. `python -m benchmarks.architectures --save` measures all of this into
`benchmarks/results/architectures.json`, `--page` then writes this page.

- **int8**: matmuls in int8, of all that `qfx.explain` lists.
- **SQNR**: of the main output against float32 eager. The bar is {sqnr:.0f} dB.
- **noise**: the same for the float model with white noise on the outputs of its linears and
  convolutions, as strong as the int8 error of each alone: what this model makes of such errors,
  whoever makes them.
- **cosine**: of all parameter gradients of one training step, against float32 eager. The bar is
  {cosine}.

{summary}

"""


def page() -> str:
    """docs/architectures.md. A function of the saved results alone."""
    host, rows = saved()["machine"], saved()["rows"]
    head = HEAD.format(
        count=len(rows),
        sqnr=SQNR_BAR,
        cosine=COSINE_BAR,
        summary=summary(rows),
        torch=host["torch"],
        transformers=host["transformers"],
        inner=" and ".join(sorted({r["inner"] for r in rows})),
        commit=" and ".join(sorted({r["commit"][:12] for r in rows})),
    )
    return f"{head}{table([printed(row) for row in rows])}\n{exceptions(rows)}"


def table(rows: list[dict[str, str]]) -> str:
    """Markdown without padding, so that one long cell does not widen every line."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(rows: list[Row]) -> str:
    listed = sum("skipped" in r and not r["skipped"] for r in rows)
    exact = sum(meets(r, "sqnr_db", SQNR_BAR) for r in rows)
    trained = sum(meets(r, "gradient_cosine", COSINE_BAR) for r in rows)
    return (
        f"Every linear that ran is listed in {listed} of {len(rows)}. The bar of SQNR is met by\n"
        f"{exact}, that of the gradients by {trained}. The others are explained below the table."
    )


def meets(row: Row, key: str, bar: float) -> bool:
    return row.get(key) is not None and row[key] >= bar


def missed(row: Row) -> list[str]:
    """The bars a row misses, in words."""
    words = [f"failed: {row['failure']}"] if row["failure"] else []
    words += [f"not listed: {', '.join(row['skipped'])}"] if row.get("skipped") else []
    if "sqnr_db" in row and not meets(row, "sqnr_db", SQNR_BAR):
        words.append(f"SQNR {row['sqnr_db']} dB, of the median token {row['median_token_db']} dB")
    if "int8_in_training" in row and not meets(row, "gradient_cosine", COSINE_BAR):
        float_ = "its training stayed float"
        words.append(f"cosine {row['gradient_cosine']}" if row["int8_in_training"] else float_)
    words += [f"gradient lost: {name}" for name in row.get("lost", [])]
    return words + row.get("warnings", [])


def printed(row: Row) -> dict[str, str]:
    """The cells of a row; what was not measured is empty."""
    reasons = dict(row.get("reasons", {}))
    reasons |= {f"{op} is not listed": count for op, count in row.get("unlisted", {}).items()}
    return {
        "architecture": row["architecture"],
        "kind": row["kind"],
        "int8": f"{row['int8']}/{row['matmuls']}" if "int8" in row else "",
        "SQNR dB": _number(row.get("sqnr_db"), 1),
        "noise dB": _number(row.get("noise_db"), 1),
        "cosine": _number(row.get("gradient_cosine"), 4),
        "what stayed float": "; ".join(f"{count}: {reason}" for reason, count in reasons.items()),
    }


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def exceptions(rows: list[Row]) -> str:
    lines = [
        f"- **{r['architecture']}**: {'; '.join(missed(r))}. Cause: {NOTES[r['architecture']]}."
        for r in rows
        if missed(r)
    ]
    return "\n## Below a bar\n" + "\n".join(lines) + "\n" if lines else ""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inner", choices=INNER, default="inductor")
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
        one(options.one, options.inner)
    elif options.page:
        write_text(PAGE, page())
    else:
        rows = survey(options)
        print(tabulate([printed(row) for row in rows], headers="keys"))
        print("\n".join(f"{r['architecture']}: {'; '.join(missed(r))}" for r in rows if missed(r)))


if __name__ == "__main__":
    main()
