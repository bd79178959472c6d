"""Whole models with random weights: float32, qfx, and the peers that are installed.

All candidates of a model are timed in turns in one process. A peer that is missing, that cannot
take the model or that fails is a row with the reason. Files converted for other programs are kept
from earlier runs.
The peers: pip install -c constraints.txt --no-build-isolation -e '.[peers]'
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._inductor.utils import fresh_cache

import qfx
import qfx._C as _C
from benchmarks.common import Candidate, clock, compiled_apart, interleaved
from benchmarks.peer import Answers, Run, Way, missing, reason, wrong
from benchmarks.peers import PEERS
from benchmarks.question import Question, Row, chosen
from benchmarks.results_cells import BASELINE, not_run, standings
from benchmarks.subjects import TABLE, Inputs, Outputs, Sizes, Subject
from qfx.ops.single_tensors import sqnr


def eager(model: nn.Module, inputs: Inputs) -> Run:
    return lambda: model(*inputs)


def compiled(backend: Any, model: nn.Module, inputs: Inputs) -> Run:
    f = compiled_apart(model, backend)
    return lambda: f(*inputs)


def exported(model: nn.Module, inputs: Inputs) -> Run:
    """Compiles ahead of time, to a package of AOTInductor: without the guards of torch.compile, and
    without Python at run time. The call uses inference mode, because autograd's kernels would run
    otherwise."""
    program = torch.export.export(model, inputs).module()
    gm, _ = qfx.rewrite(program)
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(gm, inputs), package_path=f"{folder}/model.pt2"
        )
        run = torch._inductor.aoti_load_package(package)

    def inference() -> Outputs:
        with torch.inference_mode():
            return run(*inputs)

    return inference


def ways() -> dict[str, Way]:
    """Returns the ways: qfx on the best instruction set of this machine, on AVX2 if that is
    another, and the peers."""
    best, *others = _C.isas()
    program = partial(qfx.backend, options={"inner": "program"})
    own = {
        BASELINE: Way(eager),
        "float32 Inductor": Way(partial(compiled, "inductor")),
        "qfx": Way(partial(compiled, qfx.backend), best),
        "qfx program": Way(partial(compiled, program), best),
        "qfx exported": Way(exported, best),
    }
    if "avx2" in others:
        own["qfx on AVX2"] = Way(partial(compiled, qfx.backend), "avx2")
    return {**own, **PEERS}


def prepared(way: Way, model: nn.Module, inputs: Inputs) -> Run | str:
    """Returns a way after its first call, from an empty Inductor cache, or the reason why it does
    not run."""
    if lacking := missing(way.packages):
        return lacking
    with fresh_cache():  # which keeps its folder where an error passes through
        try:
            way.set_isa()
            run = way.prepare(model, inputs)
            run()
            return run
        except Exception as why:
            return reason(why)


def measure(
    subject: Subject,
    used: Mapping[str, Way],
    rounds: int,
    sizes: Sizes | None = None,
    judge: Callable[[Any, Any], Row] = lambda expected, found: {},
) -> list[Row]:
    """Returns one row for each of `used`, the baseline among them, in its order. `judge(expected,
    found)` adds figures of outputs that are not wrong."""
    model, inputs = subject.build(sizes)
    best_isa, rows = _C.isa(), []
    with torch.no_grad():
        expected = model(*inputs)  # before any peer is given the model
        found = {name: prepared(way, model, inputs) for name, way in used.items()}
        runs = {n: Candidate(r, used[n].set_isa) for n, r in found.items() if callable(r)}
        times = interleaved(runs, rounds, clock())
        for name, run in found.items():
            row = {"model": subject.name, "candidate": name, "threads": torch.get_num_threads()}
            row["isa"] = used[name].isa
            used[name].set_isa()
            if callable(run):
                answer = run()
                row |= figures(name, expected, answer, times)
                row |= judge(expected, answer) if "reason" not in row else {}
            else:
                row["reason"] = run
            rows.append(row)
    _C.set_isa(best_isa)
    return rows


def figures(name: str, expected: Answers, answer: Answers, times: Mapping[str, float]) -> Row:
    """Returns milliseconds per call, the speed relative to float32 eager, and the SQNR of the
    outputs relative to its outputs: of the hidden state, and of the logits if the model has them.
    If they are wrong, there is a reason instead."""
    decibels = {
        part: round(sqnr(e, f.float()), 2)
        for part, e, f in zip(("sqnr_db", "logits_sqnr_db"), expected, answer, strict=False)
        if e is not None and f is not None
    }
    if why := wrong(min(decibels.values())):
        return {"reason": why}
    return {
        "median_ms": round(times[name] * 1e3, 3),
        "ratio": round(times[BASELINE] / times[name], 3),
        **(decibels if name != BASELINE else {}),
    }


def below(rows: list[Row]) -> list[str]:
    """Returns a line for each way that did not run, then the rank of qfx."""
    return [f"{rows[0]['model']}: {line}" for line in (*not_run(rows), *standings(rows))]


def tables(options: Namespace) -> Iterator[list[Row]]:
    everything = ways()
    kept = {BASELINE, *chosen(options.candidates, everything)}
    used = {name: way for name, way in everything.items() if name in kept}
    for name in chosen(options.models, TABLE):
        yield measure(TABLE[name], used, options.rounds)


QUESTION = Question(
    "How fast are whole models, compared with float32 and with other libraries?",
    tables,
    key=("model", "candidate"),
    options={"models": list(TABLE), "candidates": list(ways())},
    rounds=7,
    below=below,
)
