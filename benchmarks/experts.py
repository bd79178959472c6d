"""A block of experts in int8 and in 4 bits, against PyTorch in float32 and bfloat16.

Each call routes its tokens anew, so that one token reads the weights of experts that were not used
just before. All ways take turns; with one thread the times are processor seconds.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Candidate, clock, interleaved, keep_memory, read_gb_s
from benchmarks.question import Question, Row, chosen
from qfx import _C, Config
from qfx.ops.forms import of_scheme
from qfx.ops.packing import Packing, expert_parts

_ROUTINGS = 8  # that take turns
READ_MB = 300


class Shape(NamedTuple):
    """A block: how many experts there are and how many a token uses, K and the hidden size of
    each."""

    experts: int
    slots: int
    k: int
    hidden: int


CASES = {
    "olmoe": Shape(64, 8, 2048, 1024),
    "mixture": Shape(8, 2, 1024, 2816),
}
Routing = tuple[Tensor, Tensor]
Block = Callable[[Tensor, Tensor, Tensor], Tensor]


class Weights(NamedTuple):
    """Float weights of gates and values [E, 2 I, K], and of outputs [E, K, I]."""

    up: Tensor
    down: Tensor

    def loop(self, x: Tensor, expert: Tensor, routing: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in expert.unique().tolist():
            token, slot = torch.where(expert == e)
            g, v = F.linear(x[token], self.up[e]).chunk(2, -1)
            weight = routing[token, slot, None].to(x.dtype)
            y.index_add_(0, token, F.linear(F.silu(g) * v, self.down[e]) * weight)
        return y

    def grouped(self, x: Tensor, expert: Tensor, routing: Tensor) -> Tensor:
        """Computes what transformers does by default in bfloat16."""
        slots = expert.shape[1]
        numbers, order = expert.reshape(-1).sort()
        ends = torch.bincount(numbers, minlength=len(self.up)).cumsum(0, dtype=torch.int32)
        u = F.grouped_mm(x[order // slots], self.up.mT, offs=ends)
        g, v = u.chunk(2, -1)
        y = F.grouped_mm(F.silu(g) * v, self.down.mT, offs=ends)
        y = y * routing.reshape(-1)[order, None].to(x.dtype)
        return y[order.argsort()].view(*expert.shape, -1).sum(1)


def in_scheme(weights: Weights, name: str) -> tuple[Block, int]:
    """Returns the block in a scheme of qfx, and the bytes of the weights of an expert."""
    packed, layouts, codes = [], [], []
    for w in weights:
        experts, n, k = w.shape
        scheme = Config(scheme=name).chosen.at(k)
        rotation = scheme.block(k)
        packing = Packing(scheme.w, rotation=rotation, group=scheme.group)
        packed.append(expert_parts(w, experts, packing, k)["weight"])
        how = of_scheme(scheme, n, rotation)
        layouts.append(how["layout"])
        codes.append(how["code"])
    up, down = zip(packed, layouts, (None, None), strict=True)

    def run(x: Tensor, expert: Tensor, routing: Tensor) -> Tensor:
        end = (*codes, "silu", "halves", x.dtype)
        y: Tensor = torch.ops.qfx.experts.default(x, expert, routing, *up, *down, *end)
        return y

    return run, sum(p.nbytes for p in packed) // len(weights.up)


def routings(of: Shape, tokens: int) -> list[Routing]:
    made = []
    for _ in range(_ROUTINGS):
        expert = torch.stack([torch.randperm(of.experts)[: of.slots] for _ in range(tokens)])
        made.append((expert, torch.rand(tokens, of.slots)))
    return made


def measure(name: str, tokens: list[int], rounds: int) -> Iterator[list[Row]]:
    """Yields a list of rows for each number of tokens."""
    torch.manual_seed(0)
    of = CASES[name]
    shapes = ((of.experts, 2 * of.hidden, of.k), (of.experts, of.k, of.hidden))
    wide = Weights(*(torch.randn(shape) * shape[-1] ** -0.5 for shape in shapes))
    half = Weights(*(w.bfloat16() for w in wide))
    of_float = wide.up[0].nbytes + wide.down[0].nbytes
    ways: dict[str, tuple[Block, int, torch.dtype]] = {
        "float32 loop": (wide.loop, of_float, torch.float32),
        "bfloat16 loop": (half.loop, of_float // 2, torch.bfloat16),
        "bfloat16 grouped": (half.grouped, of_float // 2, torch.bfloat16),
    }
    ways |= {s: (*in_scheme(wide, s), torch.float32) for s in ("w8a8", "w4a8")}
    rate = read_gb_s(READ_MB)
    for count in tokens:
        yield _rows(name, count, ways, rounds, rate)


def _rows(
    name: str,
    tokens: int,
    ways: dict[str, tuple[Block, int, torch.dtype]],
    rounds: int,
    rate: float,
) -> list[Row]:
    of = CASES[name]
    given = routings(of, tokens)
    hit = sum(len(expert.unique()) for expert, _ in given) / len(given)
    x = torch.randn(tokens, of.k)

    def candidate(block: Block, dtype: torch.dtype) -> Candidate:
        turns, own = cycle(given), x.to(dtype)
        return Candidate(lambda: block(own, *next(turns)))

    times = interleaved(
        {way: candidate(block, dtype) for way, (block, _, dtype) in ways.items()}, rounds, clock()
    )
    macs = 3 * tokens * of.slots * of.k * of.hidden
    return [
        {"case": name, "tokens": tokens, "isa": _C.isa(), "way": way}
        | {"ms": round(1e3 * taken, 3), "of float32": round(times["float32 loop"] / taken, 2)}
        | {"of read rate": round(hit * ways[way][1] / taken / rate / 1e9, 2)}
        | {"GMAC/s": round(macs / taken / 1e9, 1)}
        for way, taken in times.items()
    ]


@torch.inference_mode()
def tables(options: Namespace) -> Iterator[list[Row]]:
    keep_memory()
    for name in chosen(options.cases, CASES):
        yield from measure(name, [int(count) for count in options.tokens], options.rounds)


QUESTION = Question(
    "How fast is a block of experts in int8, compared with float32 and bfloat16?",
    tables,
    key=("case", "tokens", "way"),
    options={"cases": list(CASES), "tokens": ["1", "8", "64", "512"]},
    rounds=7,
)
