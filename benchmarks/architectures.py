"""A survey of `transformers`: does qfx find every linear, and how exact are results and gradients?

Each architecture of `benchmarks/zoo.py` runs in a process of its own, so that a crash or the time
limit ends one row, not the survey. `--inner aot_eager` takes minutes instead of an hour.
`python -m benchmarks.results_page` writes docs/architectures.md.
"""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import version

import torch

from benchmarks.fresh import FailedError, call
from benchmarks.measures import PARTS
from benchmarks.question import Question, Row, chosen
from benchmarks.survey_page import missed
from benchmarks.zoo import TABLE, build

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def one(name: str, inner: str) -> Row:
    """Measures one architecture in this process; `failure` says what stopped it, if anything
    did."""
    row: Row = {"failure": ""}
    try:
        for part in PARTS:
            row |= part(*build(TABLE[name]), inner)
    except Exception as why:  # a model may raise anything, and its row says what
        row["failure"] = re.sub(r"0x\w+", "0x", f"{type(why).__name__}: {why}".split("\n")[0])[:200]
    return row


def tables(options: Namespace) -> Iterator[list[Row]]:
    for name in chosen(options.only, TABLE):
        start = time.perf_counter()
        of = TABLE[name]
        row: Row = {
            "architecture": name,
            "kind": of.kind,
            "model": of.model,
            "inner": options.inner,
        }
        try:
            how: Row = {"environment": ONE_THREAD, "limit_s": options.limit}
            row |= call(one, name, options.inner, **how)
        except FailedError as why:
            row["failure"] = str(why)
        row |= {"seconds": round(time.perf_counter() - start), "torch": torch.__version__}
        yield [row | {"transformers": version("transformers")}]


def below(rows: list[Row]) -> list[str]:
    return [f"{row['architecture']}: {'; '.join(missed(row))}" for row in rows if missed(row)]


QUESTION = Question(
    "How many matmuls of which architectures become int8, and how exact are they?",
    tables,
    key=("architecture",),
    options={"only": list(TABLE), "inner": "inductor", "limit": 600.0},
    columns=("architecture", "int8", "matmuls", "sqnr_db", "gradient_cosine", "seconds"),
    below=below,
)
