"""The runner of all benchmarks.

    python -m benchmarks                                          lists the questions
    python -m benchmarks QUESTION [--threads 1] [--rounds 15] [--save] [options of its own]
    python -m benchmarks QUESTION --help                          lists the options
`--save` writes the rows to benchmarks/results. Lists are separated by commas, or by semicolons if
a value contains commas. GPUs have a command of their own, `python -m benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.common import machine, merge
from benchmarks.question import Question, Row

QUESTIONS = (
    "linear",
    "attention",
    "experts",
    "convolutions",
    "recurrent",
    "models",
    "networks",
    "accuracy",
    "training",
    "lora",
    "curves",
    "compiling",
    "cost",
    "architectures",
    "census",
    "decode",
    "first_token",
    "served",
    "sentences",
)


def question(name: str) -> Question:
    found: Question = import_module(f"benchmarks.{name}").QUESTION
    return found


def parser(name: str, asked: Question) -> argparse.ArgumentParser:
    """Returns the parser of a question's options. The type of an option is that of its default."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=asked.asks)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--rounds", type=int, default=asked.rounds)
    made.add_argument("--save", action="store_true", help="write benchmarks/results")
    for option, default in asked.options.items():
        how: dict[str, Any] = {"type": _listed(default) if _is_list(default) else type(default)}
        if isinstance(default, bool):
            how = {"action": "store_true"}
        made.add_argument(f"--{option}", default=default, help=f"default: {default}", **how)
    return made


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _listed(default: Sequence[Any]) -> Callable[[str], list[Any]]:
    kind = type(default[0]) if default else str
    return lambda text: [kind(v) for v in text.split(";" if ";" in text else ",")]


def run(name: str, asked: Question, options: argparse.Namespace) -> None:
    """Measures, prints and, if asked to, saves the rows."""
    host = machine()
    print(host)
    origin = {key: host[key] for key in ("threads", "commit", "uncommitted_changes")}
    for rows in asked.tables(options):
        rows = [{**row, **origin} for row in rows]
        print(tabulate([_printed(row, asked) for row in rows], headers="keys"), flush=True)
        print(*asked.below(rows), sep="\n", flush=True)
        if options.save:
            file = merge(name.replace("_", "-"), rows, (*asked.key, "threads"))
            print(f"wrote {file}", flush=True)


def _printed(row: Row, asked: Question) -> Row:
    hidden = ("commit", "uncommitted_changes", "threads")
    columns = asked.columns or [key for key in row if key not in hidden]
    return {key: row[key] for key in columns if key in row}


def main(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] not in QUESTIONS:
        print(tabulate([(name, question(name).asks) for name in QUESTIONS], tablefmt="plain"))
        sys.exit(2 if arguments and arguments[0] not in ("-h", "--help") else 0)
    name, *rest = arguments
    asked = question(name)
    options = parser(name, asked).parse_args(rest)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for category in (DeprecationWarning, FutureWarning):  # what peers say of themselves
        warnings.simplefilter("ignore", category)
    run(name, asked, options)


if __name__ == "__main__":
    main(sys.argv[1:])
