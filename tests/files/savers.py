"""Processes that save into one folder, and others that load from it at the same time:
`python -m tests.files.savers 500` prints what 500 rounds came to."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import qfx
from tests.files.kill_points import (
    NEW,
    NEW_RECIPE,
    OLD,
    OLD_RECIPE,
    files,
    model_state,
    recipe_state,
)

FORK = multiprocessing.get_context("fork")  # what was imported need not be again
SAVES: tuple[Callable[[Path], object], ...] = (
    lambda folder: qfx.save(OLD, folder, recipe=OLD_RECIPE, shard_size=5000),
    lambda folder: qfx.save(NEW, folder, recipe=NEW_RECIPE, shard_size=20_000),
)
STATES: tuple[Callable[[Path], str], ...] = (model_state, recipe_state)


class Counted(NamedTuple):
    """`lost`: rounds after which the folder held neither set whole, or files of both. `failed`:
    saves that raised. `reads`: of models and recipes; `refused`: those that raised; `mixed`: those
    that found what nobody saved."""

    rounds: int
    lost: int
    failed: int
    reads: int
    refused: int
    mixed: int


def run(folder: Path, count: int) -> Counted:
    """In each round two processes save two times each, and two others read until these end."""
    known = []
    for save in SAVES:
        save(folder)
        known.append((tuple(state(folder) for state in STATES), {*files(folder)}))
    total = [0] * 4
    lost = 0
    for _ in range(count):
        stop, results = FORK.Event(), FORK.SimpleQueue()
        readers = [
            FORK.Process(target=_read, args=(folder, i, known, stop, results)) for i in (0, 1)
        ]
        savers = [FORK.Process(target=_save, args=(folder, save, results)) for save in SAVES]
        for process in (*readers, *savers):
            process.start()
        for process in savers:
            process.join()
        stop.set()
        for _ in range(4):
            total = [a + b for a, b in zip(total, results.get(), strict=True)]
        for process in readers:
            process.join()
        lost += (tuple(state(folder) for state in STATES), {*files(folder)}) not in known
    return Counted(count, lost, *total)


def _save(folder: Path, save: Callable[[Path], object], results: Any) -> None:
    failed = 0
    for _ in range(2):
        try:
            save(folder)
        except Exception as why:
            failed += 1
            print("save:", why, file=sys.stderr)
    results.put((failed, 0, 0, 0))


def _read(folder: Path, which: int, known: Any, stop: Any, results: Any) -> None:
    reads = refused = mixed = 0
    while not stop.is_set():
        reads += 1
        try:
            found = STATES[which](folder)
        except Exception as why:
            refused += 1
            print("read:", why, file=sys.stderr)
        else:
            mixed += found not in [states[which] for states, _ in known]
    results.put((0, reads, refused, mixed))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        print(run(Path(place), int(sys.argv[1])))
