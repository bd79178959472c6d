"""One linear layer in int8 and with fewer bits on every instruction set of this machine, compared
with F.linear in float32, and with `--peers` with linears of other libraries.

All take turns in one process. `sqnr_db`: of the output, compared with the product in float64. With
`--cold MB`, weights of each kind fill that memory and are used one after the other, so that no
cache holds them when they are used again, as when a model decodes; the memory rate is then compared
with the one at which torch sums the same bytes.
    python -m benchmarks linear --shapes 1x2048x2048 --kinds 'int8;4 bits, 64' --cold 1000
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Candidate, clock, keep_memory, read_gb_s, sampled
from benchmarks.linear_peers import PEERS, Layer, prepared
from benchmarks.peer import wrong
from benchmarks.question import Question, Row, chosen
from qfx import _C
from qfx.ops.code import code_of
from qfx.ops.layout import layout_of
from qfx.ops.packing import Packing
from qfx.ops.single_tensors import sqnr
from qfx.values.scheme import QSpec
from qfx.weights.cache import pack

OPS = torch.ops.qfx
FLOAT, INT8, SEVEN, BINARY = "float32", "int8", "7-bit", "1-bit"
LARGEST_FOR_REF = 2**24  # multiply-adds: the scalar reference is for small shapes
SIZES = ((768, 768), (768, 3072), (3072, 768), (2048, 2048), (4096, 4096), (4096, 11008))  # K, N
SHAPES = [f"{m}x{k}x{n}" for (k, n), m in product(SIZES, (1, 4, 16, 128, 512))]
ASYMMETRIC = QSpec(symmetric=False)


class Kind(NamedTuple):
    """The quantization of weights and activations, and the rotation of both."""

    w: QSpec = QSpec()
    x: QSpec = ASYMMETRIC
    rotation: int = 0


KINDS = {
    INT8: Kind(),
    SEVEN: Kind(QSpec(7), QSpec(7, symmetric=False)),
    "rotated": Kind(rotation=64),
    "groups 64": Kind(QSpec(group=64), QSpec(group=64), 64),
    "5 bits, 64": Kind(QSpec(5, symmetric=False, group=64, packed=True), QSpec(), 64),
    "4 bits, 64": Kind(QSpec(4, symmetric=False, group=64, packed=True), QSpec(), 64),
    BINARY: Kind(),
}


class Shape(NamedTuple):
    """The sizes of y [m, n] = x [m, k] @ w [n, k].T."""

    m: int
    k: int
    n: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(*map(int, text.split("x")))

    @property
    def macs(self) -> int:
        return self.m * self.k * self.n


def operands(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((shape.m, shape.k), (shape.n, shape.k), (shape.n,))
    x_mk, w_nk, bias_n = (torch.randn(size, generator=generator) for size in sizes)
    return x_mk, w_nk, bias_n


def layer(kind: str, x_mk: Tensor, w_nk: Tensor, bias_n: Tensor) -> Layer:
    """Returns a kind of linear."""
    how: tuple[Any, ...] = ("none", torch.float32)
    if kind == FLOAT:
        weight, run, how = w_nk, F.linear, (bias_n,)
    elif kind == BINARY:
        weight, run = OPS.binary_pack(w_nk), OPS.binary_linear
        how = (w_nk.abs().mean(1), bias_n, *how)
    else:
        w, x, rotation = KINDS[kind]
        weight, run = pack(w_nk, (), Packing(w, rotation=rotation)).weight, OPS.linear_dynamic
        how = (layout_of(w, 0, len(w_nk)), bias_n, code_of(x, rotation), *how)
    return Layer(weight.clone, lambda weight: run(x_mk, weight, *how), weight.nbytes)


def ready(of: Layer, cold_mb: int) -> tuple[Layer, Callable[[], Tensor]]:
    """Returns a linear, and a function that runs it with each of its weights in turn."""
    turn = cycle([of.pack() for _ in range(max(1, (cold_mb << 20) // of.nbytes))])
    return of, lambda: of.run(next(turn))


def kernels(kinds: list[str], shape: Shape) -> Iterator[tuple[str, str]]:
    """Yields instruction sets and kinds; 7 bits only if they have kernels of their own."""
    for isa in _C.isas():
        _C.set_isa(isa)
        own = _C.kernel_for(128, 7, 7) != _C.kernel_for(128)
        for kind in kinds if isa != "ref" or shape.macs <= LARGEST_FOR_REF else ():
            if (kind != SEVEN or own) and (kind != BINARY or isa != "ref"):
                yield isa, kind


def measure(
    text: str, kinds: list[str], rounds: int, cold_mb: int, with_peers: bool
) -> Iterator[Row]:
    """Yields one row for float32, one for each kernel and, if asked to, one for each peer."""
    shape = Shape.parse(text)
    given = operands(shape)
    own = {kind: ready(layer(kind, *given), cold_mb) for kind in (FLOAT, *kinds)}
    peers = {name: prepared(name, *given) for name in (PEERS if with_peers else ())}
    best = _C.isas()[0]
    used = {FLOAT: (best, own[FLOAT])}
    used |= {_name(isa, kind): (isa, own[kind]) for isa, kind in kernels(kinds, shape)}
    used |= {n: (best, ready(of, cold_mb)) for n, of in peers.items() if isinstance(of, Layer)}
    candidates = {}
    for name, (isa, (_, run)) in used.items():
        prepare = partial(_C.set_isa, isa)
        candidates[name] = Candidate(run, prepare)
        candidates[f"{isa} peak"] = Candidate(partial(_C.multiply, 100_000), prepare)
    samples = sampled(candidates, rounds, clock())
    times = {name: median(taken) for name, taken in samples.items()}
    exact = F.linear(*(t.double() for t in given))
    read = read_gb_s(cold_mb) if cold_mb else 0.0
    more = {"cold_mb": cold_mb} if cold_mb else {}
    for name, (isa, (of, run)) in used.items():
        _C.set_isa(isa)
        db = sqnr(exact, of.finish(run()))
        if name in peers and (error := wrong(db)):
            peers[name] = error
            continue
        row = {**more, **as_row(text, name, times[name]), "sqnr_db": round(db, 1)}
        if name != FLOAT:
            row["speedup"] = round(times[FLOAT] / times[name], 3)
        if name != FLOAT and cold_mb:
            row["gb_s"] = round(of.nbytes / times[name] / 1e9, 1)
            row["percent_of_read"] = round(100 * row["gb_s"] / read)
        elif name != FLOAT:
            row["percent_of_peak"] = percent_of_peak(isa, row["gmacs"], min(samples[f"{isa} peak"]))
        yield row
    reasons = {name: why for name, why in peers.items() if isinstance(why, str)}
    yield from ({**more, "shape": text, "isa": n, "reason": w} for n, w in reasons.items())


def _name(isa: str, kind: str) -> str:
    return isa if kind == INT8 else f"{isa} {kind}"


def percent_of_peak(isa: str, gmacs: float, alone: float) -> int | None:
    """Returns the speed relative to that of the multiply instructions alone, of 8 bits for all: the
    gain of fewer bits shows as more than 100 %."""
    _C.set_isa(isa)
    peak = _C.multiply(100_000) / alone / 1e9 * torch.get_num_threads()
    return round(100 * gmacs / peak) if peak else None


def as_row(shape: str, isa: str, time: float) -> Row:
    return {
        "shape": shape,
        "isa": isa,
        "median_us": round(time * 1e6, 2),
        "gmacs": round(Shape.parse(shape).macs / time / 1e9, 2),
    }


@torch.inference_mode()
def tables(options: Namespace) -> Iterator[list[Row]]:
    keep_memory()
    kinds: list[Any] = chosen(options.kinds, KINDS)
    for shape in options.shapes:
        yield list(measure(shape, kinds, options.rounds, options.cold, options.peers))


QUESTION = Question(
    "How fast is a linear in int8 and fewer bits, compared with float32?",
    tables,
    key=("shape", "isa", "cold_mb"),
    options={"shapes": SHAPES, "kinds": [INT8, SEVEN], "cold": 0, "peers": False},
)
