"""Memory during a long generation, and recompilation by a second conversation.

SmolLM2-135M writes 5,000 tokens with a cache of 5,120, each way in a fresh process: resident memory
after some of them, and the number of graphs compiled by the end. Then the cache is reset, and a
prompt of another length is answered: the graphs that this compiles are counted.
    python -m benchmarks.decode_long [--ways qfx,...] [--threads 1] [--save]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.common import machine, merge
from benchmarks.decode_models import MODELS, text
from benchmarks.decode_static import Case, Counted, load, own
from benchmarks.decode_ways import EAGER, WAYS, Way
from benchmarks.fresh import FailedError, in_a_process
from benchmarks.resident import resident

LENGTH, MARKS = 5120, (100, 1000, 2500, 5000)  # tokens: of the cache, and new ones
SECOND, ANSWERED = 77, 64  # tokens: of the second prompt, and that follow
CHOSEN = (EAGER, "qfx generate w8a8", "qfx generate w4a8", "float32 Inductor", "qfx w8a8")
KEY = ("way", "threads")
Row = dict[str, Any]


def conversations(way: Way, case: Case, tokens: Tensor, marks: tuple[int, ...] = MARKS) -> Row:
    """Runs two conversations. The first prompt is the first `case.context` tokens of a text [1, L],
    the second its first SECOND tokens."""
    decoder: Any = way.make(case, load(case))
    found: Row = {}

    def look(count: int) -> None:
        if count in marks:
            found[f"mb_{count}"] = round(resident() / 1e6, 1)

    decoder.generate(own(tokens[:, : case.context]), case.new, streamer=Counted(look))
    found["graphs"] = _graphs()
    decoder.generate(own(tokens[:, :SECOND]), min(ANSWERED, case.length - SECOND - 1))
    found["graphs_second"] = _graphs() - found["graphs"]
    return found


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def one(name: str, folder: Path, threads: int, tokens: int) -> Row:
    """Measures one way in this process. `tokens`: the number of new tokens."""
    torch.set_num_threads(threads)
    case = Case(folder, 1, LENGTH - max(MARKS) - 1, tokens)
    with torch.no_grad():
        return conversations(WAYS[name], case, text(folder, 1, max(case.context, SECOND)))


def row(name: str, folder: Path, threads: int, tokens: int) -> Row:
    """Returns the row of a fresh process, or the reason why there is none."""
    head = {"way": name, "threads": threads}
    given = [f"--{k}={v}" for k, v in {"threads": threads, "tokens": tokens}.items()]
    try:
        return head | in_a_process("benchmarks.decode_long", "--one", name, str(folder), *given)
    except FailedError as why:
        return {**head, "reason": str(why)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ways", default=",".join(CHOSEN))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=max(MARKS), help="of the first text")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--one", nargs=2, help="only this way of the model of a folder, here")
    options = parser.parse_args()
    if options.one:
        name, folder = options.one
        print(json.dumps(one(name, Path(folder), options.threads, options.tokens)))
        return
    names = options.ways.split(",")
    if unknown := set(names) - set(WAYS):
        parser.error(f"unknown {', '.join(unknown)}; there are: {', '.join(WAYS)}")
    host, folder = machine(), MODELS["smollm2"]()
    rows = [row(name, folder, options.threads, options.tokens) for name in names]
    rows = [{**r, "commit": host["commit"]} for r in rows]
    print(host)
    print(tabulate(rows, headers="keys"))
    if options.save and options.tokens >= max(MARKS):
        print(f"wrote {merge('decode-long', rows, KEY)}")


if __name__ == "__main__":
    main()
