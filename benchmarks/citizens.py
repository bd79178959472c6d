"""Libraries as a user of transformers meets them: the lines typed with qfx and its peers, and their
outcome.

SmolLM2-135M is quantized, saved, loaded, made to write 32 tokens, fine-tuned by LoRA and merged,
each task in a fresh process, after the preceding tasks, compared with float32. Times are processor
seconds. A library that is not installed has a row that says so. Linux only: memory is read from
/proc.
The peers: pip install --no-deps torchao optimum-quanto optimum bitsandbytes ninja
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.citizen_tasks import TASKS, Work
from benchmarks.fresh import FailedError, call
from benchmarks.peer import missing
from benchmarks.question import Question, Row, chosen
from benchmarks.typed import FLOAT, LIBRARIES, lines

NEW_TOKENS, PROMPT = 32, 64
BATCH, LENGTH = 4, 128


def news() -> tuple[Path, Tensor]:
    """Returns the folder of SmolLM2, and BATCH x LENGTH tokens of news."""
    from transformers import AutoTokenizer

    from benchmarks.smollm import converted, passages

    folder = converted()
    rows = passages(AutoTokenizer.from_pretrained(folder), 0, BATCH, LENGTH)
    return folder, torch.cat([row for row, _ in rows])


def prepare(work: Work, batch: Tensor) -> None:
    """Writes the tokens of all tasks: `batch` [B, L], and the start of its first row as the
    prompt."""
    tokens = {"batch": batch, "prompt": batch[:1, :PROMPT].clone()}
    torch.save(tokens, Path(work.folder) / "tokens.pt")


def outcome(library: str, task: str, work: dict[str, Any]) -> Row:
    """Runs a task in this process. An error is an outcome, with the first line of its message."""
    try:
        return TASKS[task][0](library, LIBRARIES[library], Work(**work))
    except Exception as why:  # a library may raise anything, and its row says what
        return failed(f"{type(why).__name__}: {why}")


def failed(said: str) -> Row:
    return {"outcome": "error", "said": said.strip().split("\n")[0]}


def apart(library: str, task: str, work: dict[str, Any]) -> Row:
    """Runs a task in a fresh process."""
    try:
        found: Row = call(outcome, library, task, work)
        return found
    except FailedError as why:
        return failed(str(why))


def typed_lines(library: str, task: str) -> int:
    return lines(getattr(LIBRARIES[library], TASKS[task][1]))


def rows(name: str, work: Work, run: Callable[[str, str, dict[str, Any]], Row]) -> list[Row]:
    """Returns a row of the library for each task, with the outcome of `run(library, task,
    work)`."""
    lacking = missing(LIBRARIES[name].packages)
    return [
        {
            "library": name,
            "task": task,
            "lines": typed_lines(name, task),
            **({"reason": lacking} if lacking else run(name, task, asdict(work))),
        }
        for task in TASKS
    ]


def tables(options: Namespace) -> Iterator[list[Row]]:
    """Yields the rows of one library after the other, those of float32, the reference, first."""
    names = chosen(options.libraries, LIBRARIES)
    with tempfile.TemporaryDirectory() as folder:
        model, batch = news()
        work = Work(str(model), folder, options.tokens, options.steps)
        prepare(work, batch)
        for name in dict.fromkeys((FLOAT, *names)):
            yield rows(name, work, apart)


QUESTION = Question(
    "What does a user of transformers type for each library, and what comes of it?",
    tables,
    key=("library", "task"),
    options={"libraries": list(LIBRARIES), "tokens": NEW_TOKENS, "steps": 5},
)
