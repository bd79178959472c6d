"""Whole models with random weights: float32, qfx, and the peers that are installed.

All candidates of a model are timed in turns in one process. A peer that is missing, that cannot
take the model or that fails is a row with the reason. CPU seconds to prepare start from an empty
Inductor cache, while files converted for other programs are kept from earlier runs; one-time costs
of a process are counted for its first candidate (`python -m benchmarks.prepare` gives each its own
process).
    python -m benchmarks.models [--models bert-1x128,...] [--threads 1] [--rounds 7] [--save]
The peers: pip install -c constraints.txt --no-build-isolation -e '.[peers]'
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import qfx._C as _C
import torch
from tabulate import tabulate
from torch import nn
from torch._inductor.utils import fresh_cache

import qfx
from benchmarks.common import (
    Candidate,
    Timing,
    compiled_apart,
    cpu_seconds,
    interleaved,
    machine,
    merge,
)
from benchmarks.peer import Answers, Prepare, Run, UnsupportedError, missing
from benchmarks.peers import PEERS
from benchmarks.standing import standings
from benchmarks.subjects import TABLE, Inputs, Outputs, Sizes, Subject
from qfx.ops.single_tensors import sqnr

BASELINE = "float32 eager"
KEY = ("model", "candidate", "threads")
Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One way to run a model. `isa`: the instruction set of qfx's kernels, if they are used.
    `packages`: those it needs, by their names for pip."""

    prepare: Prepare
    isa: str | None = None
    packages: tuple[str, ...] = ()

    def set_isa(self) -> None:
        if self.isa:
            _C.set_isa(self.isa)


@dataclass(frozen=True)
class Prepared:
    run: Run
    outputs: Answers
    cpu_s: float


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
    own = {
        BASELINE: Way(eager),
        "float32 Inductor": Way(partial(compiled, "inductor")),
        "qfx": Way(partial(compiled, qfx.backend), best),
        "qfx exported": Way(exported, best),
    }
    if "avx2" in others:
        own["qfx on AVX2"] = Way(partial(compiled, qfx.backend), "avx2")
    peers = {name: Way(p.prepare, packages=p.packages) for name, p in PEERS.items()}
    return {**own, **peers}


def prepared(way: Way, model: nn.Module, inputs: Inputs) -> Prepared | str:
    """Returns a way after its first call, from an empty Inductor cache, or the reason why it does
    not run."""
    if lacking := missing(way.packages):
        return lacking
    with fresh_cache():  # which keeps its folder where an error passes through
        try:
            way.set_isa()
            start = cpu_seconds()
            run = way.prepare(model, inputs)
            outputs = run()
            return Prepared(run, outputs, cpu_seconds() - start)
        except UnsupportedError as why:
            return str(why)
        except Exception as why:  # a peer may raise anything, and its row says what
            return f"{type(why).__name__}: {why}".split("\n")[0]


def measure(
    subject: Subject, chosen: Mapping[str, Way], rounds: int, sizes: Sizes | None = None
) -> list[Row]:
    """Returns one row for each of `chosen`, the baseline among them, in its order."""
    model, inputs = subject.build(sizes)
    best_isa = _C.isa()
    with torch.no_grad():
        found = {name: prepared(way, model, inputs) for name, way in chosen.items()}
        ready = {name: p for name, p in found.items() if isinstance(p, Prepared)}
        failed = {name: why for name, why in found.items() if isinstance(why, str)}
        runs = {name: Candidate(p.run, chosen[name].set_isa) for name, p in ready.items()}
        times = interleaved(runs, rounds)
    _C.set_isa(best_isa)
    return [
        {
            "model": subject.name,
            "candidate": name,
            "threads": torch.get_num_threads(),
            "isa": way.isa,
            **({"reason": failed[name]} if name in failed else figures(name, ready, times)),
        }
        for name, way in chosen.items()
    ]


def figures(name: str, ready: Mapping[str, Prepared], times: Mapping[str, Timing]) -> Row:
    """Returns milliseconds per call and their spread, the speed relative to float32 eager, and the
    SQNR of the outputs relative to its outputs: of the hidden state, and of the logits if the model
    has them."""
    expected, found = ready[BASELINE].outputs, ready[name].outputs
    decibels = {
        part: round(sqnr(e, f.float()), 2)
        for part, e, f in zip(("sqnr_db", "logits_sqnr_db"), expected, found, strict=False)
        if name != BASELINE and e is not None and f is not None
    }
    return {
        "median_ms": round(times[name].median * 1e3, 3),
        "best_ms": round(times[name].best * 1e3, 3),
        "spread": round(times[name].spread, 3),
        "ratio": round(times[BASELINE].median / times[name].median, 3),
        **decibels,
        "prepare_cpu_s": round(ready[name].cpu_s, 2),
    }


def report(rows: list[Row]) -> str:
    """Returns the text for one model: a table of what ran, a line for each way that did not, then
    the rank of qfx."""
    ran = [row for row in rows if "reason" not in row]
    failed = [f"{r['model']}: no {r['candidate']}: {r['reason']}" for r in rows if "reason" in r]
    places = [f"{rows[0]['model']}, {_threads(rows[0])}: {line}" for line in standings(rows)]
    return "\n".join([tabulate(ran, headers="keys"), *failed, *places])


def _threads(row: Row) -> str:
    return f"{row['threads']} thread{'' if row['threads'] == 1 else 's'}"


def names(text: str, known: Mapping[str, Any]) -> list[str]:
    found = text.split(",")
    if unknown := [name for name in found if name not in known]:
        raise SystemExit(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(TABLE))
    parser.add_argument("--candidates", help="beside float32 eager; all by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    return parser.parse_args()


def quiet() -> None:
    """Ignores the deprecation warnings of the peers; qfx's own warnings are of another kind."""
    for category in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", category)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    quiet()
    everything = ways()
    chosen = everything
    if options.candidates:
        kept = {BASELINE, *names(options.candidates, everything)}
        chosen = {name: way for name, way in everything.items() if name in kept}
    host = machine()
    print(host)
    for name in names(options.models, TABLE):
        rows = measure(TABLE[name], chosen, options.rounds)
        print(report(rows), flush=True)
        if options.save:
            print(f"wrote {merge('models', [{**r, 'commit': host['commit']} for r in rows], KEY)}")


if __name__ == "__main__":
    main()
