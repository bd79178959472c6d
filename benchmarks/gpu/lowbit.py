"""Weights of 4 and 5 bits on a GPU: float activations of few rows and of many, for which weights
are expanded to floats, against bfloat16 and int8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch.nn.functional as F

from benchmarks.gpu.products import ROWS, Linear, copies
from benchmarks.gpu.session import Call, Row, Session
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec

SHAPES = ((4096, 4096), (4096, 14336), (16384, 16384))  # K, N
WAYS = {
    "int8": ROWS,
    "int4": Packing(QSpec(bits=4, group=64, packed=True)),
    "int5": Packing(QSpec(bits=5, group=64, packed=True)),
}
# By rows, bfloat16 seconds divided by those of int4 and int5.
MUST = {1: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 64: 1.0, 128: 0.25, 2048: 0.5}
# Of outputs, twice what rounding normally distributed weights gives: the largest of 64 is about 2.4
# standard deviations, a step is that divided by 7 or 15, and its error is uniform.
LARGEST_ERROR = {"int4": 0.2, "int5": 0.1}


def lowbit(session: Session) -> Iterator[Row]:
    """Yields for each shape and number of rows the times of all ways, and the ratios of int4 and
    int5 with the outputs' error relative to bfloat16."""
    for k, n in SHAPES[:1] if session.dry else SHAPES:
        sizes = (session.size(max(MUST)), session.size(k), session.size(n))
        packed = {way: copies(session, *sizes, packing=packing) for way, packing in WAYS.items()}
        for m, must in MUST.items():
            yield from _timed(session, packed, min(m, sizes[0]), must)


def _timed(session: Session, packed: dict[str, list[Linear]], m: int, must: float) -> Iterator[Row]:
    few = {
        way: [replace(linear, x=linear.x[:m]) for linear in linears]
        for way, linears in packed.items()
    }
    calls: dict[str, list[Call]] = {
        "bf16": [partial(F.linear, linear.x, linear.w) for linear in few["int8"]]
    }
    calls |= {way: [linear.weight_only for linear in linears] for way, linears in few.items()}
    seconds = {way: session.seconds(*each) for way, each in calls.items()}
    us = {way: round(s * 1e6, 2) for way, s in seconds.items()}
    for way in LARGEST_ERROR:
        linear = few[way][0]
        expected, got = linear.in_float().float(), linear.weight_only().float()
        error = float((got - expected).norm() / expected.norm())
        row: Row = {"what": f"{m}x{len(linear.w)}x{linear.x.shape[1]}", "judged": way}
        row |= {"ratio": seconds["bf16"] / seconds[way], "must": must}
        row |= {"relative_error": error, "ok": error < LARGEST_ERROR[way]}
        yield {**row, "TB/s": linear.weight.numel() / seconds[way] / 1e12, "us": us}
