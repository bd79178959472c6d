"""One linear layer in int8 and with fewer bits on every instruction set of this machine, compared
with F.linear in float32.

All take turns in one process. With `--cold MB`, weights of each kind fill that memory and are used
one after the other, so that no cache holds them when they are used again, as when a model decodes;
the memory rate is then compared with the one at which torch sums the same bytes.
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

from benchmarks.common import Candidate, keep_memory, read_gb_s, sampled
from benchmarks.question import Question, Row, chosen
from qfx import _C
from qfx.ops.code import code_of
from qfx.ops.layout import layout_of
from qfx.ops.packing import Packing
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


def call(kind: str, shape: Shape, cold_mb: int) -> tuple[Callable[[], Tensor], int]:
    """Returns a function that runs a kind of linear, and the bytes of a weight."""
    generator = torch.Generator().manual_seed(0)
    x_mk, w_nk, bias_n = (
        torch.randn(size, generator=generator)
        for size in ((shape.m, shape.k), (shape.n, shape.k), (shape.n,))
    )
    how: tuple[Any, ...] = ("none", torch.float32)
    if kind == FLOAT:
        weight, run, how = w_nk, F.linear, (bias_n,)
    elif kind == BINARY:
        weight, run = OPS.binary_pack(w_nk), OPS.binary_linear
        how = (w_nk.abs().mean(1), bias_n, *how)
    else:
        w, x, rotation = KINDS[kind]
        weight, run = pack(w_nk, (), Packing(w, rotation=rotation)).weight, OPS.linear_dynamic
        how = (layout_of(w, 0, shape.n), bias_n, code_of(x, rotation), *how)
    copies = max(0, (cold_mb << 20) // weight.nbytes - 1)
    turn = cycle([weight, *(weight.clone() for _ in range(copies))])
    return lambda: run(x_mk, next(turn), *how), weight.nbytes


def kernels(kinds: list[str], shape: Shape) -> Iterator[tuple[str, str]]:
    """Yields instruction sets and kinds; 7 bits only if they have kernels of their own."""
    for isa in _C.isas():
        _C.set_isa(isa)
        own = _C.kernel_for(128, 7, 7) != _C.kernel_for(128)
        for kind in kinds if isa != "ref" or shape.macs <= LARGEST_FOR_REF else ():
            if (kind != SEVEN or own) and (kind != BINARY or isa != "ref"):
                yield isa, kind


def measure(text: str, kinds: list[str], rounds: int, cold_mb: int) -> list[Row]:
    """Returns one row for float32 and one for each kernel."""
    shape = Shape.parse(text)
    calls = {kind: call(kind, shape, cold_mb) for kind in (FLOAT, *kinds)}
    used = list(kernels(kinds, shape))
    candidates = {FLOAT: Candidate(calls[FLOAT][0])}
    for isa, kind in used:
        prepare = partial(_C.set_isa, isa)
        candidates[_name(isa, kind)] = Candidate(calls[kind][0], prepare)
        candidates[f"{isa} peak"] = Candidate(partial(_C.multiply, 100_000), prepare)
    samples = sampled(candidates, rounds)
    times = {name: median(taken) for name, taken in samples.items()}
    more = {"cold_mb": cold_mb} if cold_mb else {}
    read = read_gb_s(cold_mb) if cold_mb else 0.0
    rows = [{**more, **as_row(text, FLOAT, times[FLOAT])}]
    for isa, kind in used:
        time = times[_name(isa, kind)]
        row = {**more, **as_row(text, _name(isa, kind), time)}
        row["speedup"] = round(times[FLOAT] / time, 3)
        if cold_mb:
            row["gb_s"] = round(calls[kind][1] / time / 1e9, 1)
            row["percent_of_read"] = round(100 * row["gb_s"] / read)
        else:
            row["percent_of_peak"] = percent_of_peak(isa, row["gmacs"], min(samples[f"{isa} peak"]))
        rows.append(row)
    return rows


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
        yield measure(shape, kinds, options.rounds, options.cold)


QUESTION = Question(
    "How fast is a linear in int8 and fewer bits, compared with float32?",
    tables,
    key=("shape", "isa", "cold_mb"),
    options={"shapes": SHAPES, "kinds": [INT8, SEVEN], "cold": 0},
)
