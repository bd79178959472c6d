"""One way of benchmarks/decode.py in a process of its own, which receives requests for rounds line
by line.

Thus every way has its own memory, threads and compiled code and is prepared once, and all can be
measured in turn. An answer is a line of JSON that begins with ANSWER.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.bandwidth import rate, readers, weights
from benchmarks.common import cpu_seconds, keep_memory
from benchmarks.decode_parts import shares
from benchmarks.decode_peers import PEERS
from benchmarks.decode_static import Case, load, own
from benchmarks.decode_ways import WAYS
from benchmarks.peer import UnsupportedError, missing

ANSWER = "answer: "
READING = "reading"  # not a way: the rate at which memory is read
PROFILED, UNTIMED = 8, 2
Figures = dict[str, Any]


class Measured:
    """A prepared way: it has already run everything that rounds will run."""

    def __init__(self, name: str, case: Case, tokens: Tensor) -> None:
        start = cpu_seconds()
        self.case, self.told = case, own(tokens[:, : case.context])
        self.next = [own(t) for t in tokens[:, case.context :].split(1, 1)][: case.new]
        way = {**WAYS, **PEERS}[name]
        if lacking := missing(way.packages):
            raise UnsupportedError(lacking)
        self.decoder: Any = way.make(case, load(case))
        self.decoder.prefill(self.told)
        self.logits = torch.stack([self._step(token) for token in self.next[:UNTIMED]])
        self._generate(2)
        self.graphs = counters["stats"]["unique_graphs"]
        self.prepare_s = cpu_seconds() - start

    def facts(self) -> Figures:
        return {"prepare_cpu_s": self.prepare_s, "graphs": self.graphs}

    def round(self) -> Figures:
        """Returns the seconds of the prefill, of a step (median), and of a token of `generate`."""
        prefill_s = _seconds(lambda: self.decoder.prefill(self.told))
        steps = []
        for token in self.next:
            self.decoder.prepare()
            steps.append(_seconds(partial(self.decoder.step, token)))
        found = {"prefill_s": prefill_s, "step_s": median(steps[UNTIMED:])}
        one = self._generate(1)
        if one is not None:
            found["generate_s"] = (self._generate(self.case.new + 1) - one) / self.case.new
        return found

    def parts(self) -> Figures:
        """Returns the parts of a step of a way that PyTorch runs, and the memory reported by the
        system."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {
            "peak_mb": peak / 1e6,
            "compiled_later": counters["stats"]["unique_graphs"] - self.graphs,
            "graph_breaks": sum(counters["graph_break"].values()),
        }
        if hasattr(self.decoder, "weights"):
            if hasattr(self.decoder, "cache_bytes"):
                held = self.decoder.cache_bytes * self.case.batch * self.case.context
                found["cache_mb"] = held / 1e6
            return {**found, "weights_mb": self.decoder.weights / 1e6}
        self.decoder.prefill(self.told)
        turn = iter(self.next)
        for _ in range(UNTIMED):
            self._step(next(turn))
        left = min(PROFILED, self.case.new - UNTIMED)
        part, size = shares(lambda: self._step(next(turn)), left, self.decoder.outside)
        return {**found, "shares": part, "weights_mb": size / 1e6}

    def _step(self, token: Tensor) -> Tensor:
        self.decoder.prepare()
        return self.decoder.step(token)  # type: ignore[no-any-return]

    def _generate(self, new: int) -> Any:
        """Returns the seconds of a call of `generate`, or None if there is no such call."""
        if not hasattr(self.decoder, "generate"):
            return None
        return _seconds(lambda: self.decoder.generate(self.told, new))


class Reading:
    """Reading of memory by sums, as in benchmarks/bandwidth.py."""

    def __init__(self) -> None:
        self.turn = cycle(weights(512))
        self.logits = torch.zeros(0)

    def facts(self) -> Figures:
        return {}

    def round(self) -> Figures:
        """Returns the GB/s of the faster of two sums, as the median of several."""
        found = [[rate(reader, self.turn) for _ in range(9)] for reader in readers().values()]
        return {"read_gb_s": max(map(median, found))}

    def parts(self) -> Figures:
        return {}


def _seconds(run: Callable[[], Any]) -> float:
    """Returns processor seconds with one thread, because other processes disturb them less;
    wall-clock seconds with several."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def _answer(**found: Any) -> None:
    print(f"{ANSWER}{json.dumps(found)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name")
    parser.add_argument("folder", type=Path, help="of the float32 model")
    parser.add_argument("text", type=Path, help="tokens, as torch.save writes them")
    parser.add_argument("logits", type=Path, help="where those of the first steps are saved")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--new", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--inner", required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    tokens = torch.load(options.text)
    case = Case(options.folder, len(tokens), options.context, options.new, options.inner)
    with torch.no_grad():
        try:
            way = Reading() if options.name == READING else Measured(options.name, case, tokens)
        except UnsupportedError as why:
            _answer(reason=str(why))
            return
        torch.save(way.logits, options.logits)
        _answer(**way.facts())
        for line in sys.stdin:
            _answer(**getattr(way, line.strip())())


if __name__ == "__main__":
    main()
