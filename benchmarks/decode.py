"""Decoding with a language model: tokens per second of the prefill, of each step, and of
`generate`, and how near the logits are to those of float32.

Steps read real text; the search for the likeliest token is not part of them. Every way has a
process of its own and is prepared once, and all are measured in turn. With one thread the times
are processor seconds.
    python -m benchmarks decode [--model qwen3] [--ways 'qfx generate w8a8,...']
        [--context 128,1024] [--batch 1,8] [--new 32] [--save]
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import clock, keep_memory, read_gb_s
from benchmarks.decode_models import MODELS, text
from benchmarks.decode_peers import PEERS
from benchmarks.decode_ways import EAGER, WAYS, Case, load, own
from benchmarks.peer import UnsupportedError, missing, reason
from benchmarks.question import Question, Row, chosen
from qfx.ops.single_tensors import sqnr

UNTIMED = 2  # first steps of a round
COMPARED = 64  # steps at most, whose logits are compared
READ_MB = 512  # that are read for the rate of memory: more than any cache has
KEY = ("model", "way", "batch", "context")


class Measured:
    """A prepared way, which has already run everything that rounds will run."""

    def __init__(self, name: str, case: Case, tokens: Tensor) -> None:
        self.case, self.told = case, own(tokens[:, : case.context])
        self.next = [own(t) for t in tokens[:, case.context :].split(1, 1)][: case.new]
        way = {**WAYS, **PEERS}[name]
        if lacking := missing(way.packages):
            raise UnsupportedError(lacking)
        self.decoder: Any = way.make(case, load(case))
        self.logits()
        self._generate(2)

    def logits(self) -> Any:
        """Returns the logits [S, B, V] of the first steps after the prompt."""
        self.decoder.prefill(self.told)
        found = []
        for token in self.next[:COMPARED]:
            self.decoder.prepare()
            found.append(self.decoder.step(token).float().clone())
        return torch.stack(found).numpy()

    def round(self) -> Row:
        """Returns the seconds of the prefill, of a step (median), and of a token of `generate`."""
        prefill_s = _seconds(lambda: self.decoder.prefill(self.told))
        steps = []
        for token in self.next:
            self.decoder.prepare()
            steps.append(_seconds(partial(self.decoder.step, token)))
        found = {"prefill_s": prefill_s, "step_s": median(steps[UNTIMED:])}
        if hasattr(self.decoder, "generate"):
            several = self._generate(self.case.new + 1)
            found["generate_s"] = (several - self._generate(1)) / self.case.new
        return found

    def totals(self) -> Row:
        """Returns the bytes that a step reads, and the most resident memory of the process, which
        Linux counts."""
        peak_kb = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
        weights_mb = round(self.decoder.weights / 1e6, 1)
        return {"weights_mb": weights_mb, "peak_mb": round(int(peak_kb) * 1.024e-3)}

    def _generate(self, new: int) -> float:
        if not hasattr(self.decoder, "generate"):
            return 0.0
        return _seconds(lambda: self.decoder.generate(self.told, new))


def _seconds(run: Callable[[], Any]) -> float:
    now = clock()
    start = now()
    run()
    return now() - start


_PREPARED: list[Measured] = []  # in the process of a way


def prepare(name: str, case: Case, tokens: Any, threads: int) -> None:
    """Makes the way of this process, which ends with the one that started it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    keep_memory()
    _PREPARED.append(Measured(name, case, torch.from_numpy(tokens)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def answer(request: str) -> Any:
    return getattr(_PREPARED[0], request)()


class Worker:
    """A way in its process. `reason` says what ended it, before or in a round."""

    def __init__(self, name: str, case: Case, tokens: Tensor, threads: int) -> None:
        self.name, self.reason, self.rounds = name, "", list[Row]()
        self.process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._run(prepare, name, case, tokens.numpy(), threads)

    def ask(self, request: str) -> Any:
        """Returns the answer, or an empty row if the way has failed."""
        return {} if self.reason else self._run(answer, request)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self.process.submit(function, *arguments).result()
        except Exception as why:
            self.reason = reason(why)
            return {}


def measure(
    names: Sequence[str], case: Case, tokens: Tensor, threads: int, rounds: int
) -> list[Row]:
    """Returns a row for each way with the medians of its rounds, float32 eager first; a way that
    does not run has the reason."""
    head = {"batch": case.batch, "context": case.context, "threads": threads, "new": case.new}
    read, rows = list[float](), list[Row]()
    workers = [Worker(n, case, tokens, threads) for n in dict.fromkeys((EAGER, *names))]
    for _ in range(rounds):
        read.append(read_gb_s(READ_MB, 1))
        for worker in workers:
            worker.rounds.append(worker.ask("round"))
    expected = workers[0].ask("logits")
    for worker in workers:
        logits, totals = worker.ask("logits"), worker.ask("totals")
        worker.process.shutdown()
        row: Row = {"way": worker.name, **head}
        if worker.reason:
            rows.append({**row, "reason": worker.reason})
            continue
        row |= {**speeds(worker.rounds, case), **totals, "read_gb_s": round(median(read), 2)}
        row["share_of_read"] = round(row["weights_mb"] / row["read_gb_s"] / row["step_ms"], 3)
        if worker is not workers[0]:
            row |= nearness(*map(torch.from_numpy, (expected, logits)))
        rows.append(row)
    return rows


def speeds(rounds: list[Row], case: Case) -> Row:
    step_s = median(r["step_s"] for r in rounds)
    row: Row = {
        "prefill_tokens_s": case.batch * case.context / median(r["prefill_s"] for r in rounds),
        "step_tokens_s": case.batch / step_s,
        "step_ms": 1e3 * step_s,
    }
    if "generate_s" in rounds[0]:
        generate_s = median(r["generate_s"] for r in rounds)
        row["generate_tokens_s"] = case.batch / generate_s
        row["loop_ms"] = 1e3 * (generate_s - step_s)
    return {name: round(value, 3) for name, value in row.items()}


def nearness(expected: Tensor, found: Tensor) -> Row:
    """Compares logits [..., V]: SQNR in dB, the mean KL of the distribution of the next token in
    nats, and the share of equal most likely tokens."""
    log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
    return {
        "logits_sqnr_db": round(float(sqnr(expected, found)), 1),
        "kl": float(f"{float((log_p.exp() * (log_p - log_q)).sum(-1).mean()):.3g}"),
        "likeliest": round(float((log_p.argmax(-1) == log_q.argmax(-1)).float().mean()), 4),
    }


def tables(options: Namespace) -> Iterator[list[Row]]:
    """Yields the rows of each batch and context."""
    ways = chosen(options.ways, {**WAYS, **PEERS})
    whole = Case(MODELS[options.model](), 1, 0, options.new)
    for batch, context in product(options.batch, options.context):
        case = replace(whole, batch=batch, context=context)
        tokens = text(case.folder, batch, context + options.new)
        rows = measure(ways, case, tokens, options.threads, options.rounds)
        yield [{**row, "model": options.model} for row in rows]


QUESTION = Question(
    "How many tokens per second does a language model decode, and how near are its logits?",
    tables,
    KEY,
    {"model": "smollm2", "ways": [*WAYS, *PEERS], "context": [128, 1024, 4096], "batch": [1, 8],
     "new": 32},
    rounds=5,
)  # fmt: skip
