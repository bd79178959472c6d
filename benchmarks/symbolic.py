"""Measurements of one model compiled with symbolic sizes, for `benchmarks/architectures.py`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import qfx
from benchmarks.measures import Row, compiled, main_output, merged, plans
from benchmarks.zoo import SECOND, Architecture, Inputs, build
from qfx.ops.single_tensors import sqnr


def symbolic(row: Architecture, inner: str) -> Row:
    """Measures two calls of different batch size and length. For each call: the int8 matmuls that
    run, those that run when it is compiled for its sizes alone, all that `explain` lists, and the
    SQNR of its main output.

    `graphs`: compiled for both calls; `plain_graphs`: by PyTorch alone. `lost`: why matmuls stayed
    float that are int8 with known sizes.
    """
    model, first = build(row)
    calls = [first, build(row, SECOND)[1]]
    static, found = (_run(model, calls, inner, dynamic) for dynamic in (False, True))
    fewer = any(d < s for d, s in zip(found["int8"], static["int8"], strict=True))
    lost: Counter[str] = Counter(found.pop("reasons"))
    lost -= Counter(static["reasons"])
    return {
        **found,
        "static_int8": static["int8"],
        "matmuls": [_listed(model, inputs) for inputs in calls],
        "plain_graphs": _graphs(torch.compile(model, backend="eager", dynamic=True), calls),
        "lost": dict(lost) if fewer else {},
    }


def _listed(model: nn.Module, inputs: Inputs) -> int:
    torch._dynamo.reset()
    return qfx.explain(model, options={"minimum_gain": 0}, **inputs).total


def _graphs(function: Callable[..., Any], calls: Sequence[Inputs]) -> int:
    """Returns the number of graphs that these calls compile, each called twice, because some models
    change in the first call."""
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        for inputs in calls:
            function(**inputs)
            function(**inputs)
    return int(counters["stats"]["unique_graphs"])


def _run(model: nn.Module, calls: Sequence[Inputs], inner: str, dynamic: bool) -> Row:
    function = compiled(model, inner, dynamic)
    with plans() as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graphs = _graphs(function, calls)
        ran = [_counting(function, inputs) for inputs in calls]
    with torch.no_grad():
        expected = [main_output(model(**inputs)) for inputs in calls]
    outputs = zip(expected, (main_output(output) for output, _ in ran), strict=True)
    stayed = (e.reason for p in seen.values() for e in p.entries if e.scheme is None)
    return {
        "graphs": graphs,
        "int8": [int8 for _, int8 in ran],
        "sqnr_db": [round(sqnr(*pair), 2) for pair in outputs],
        "warnings": sorted({str(w.message) for w in caught if "qfx" in str(w.message)}),
        "reasons": merged(stayed),
    }


def _counting(function: Callable[..., Any], inputs: Inputs) -> tuple[Any, int]:
    """Returns the outputs of a call, and how many int8 matmuls and attentions ran in it."""
    with torch.autograd.profiler.profile(use_kineto=False) as trace, torch.no_grad():
        found = function(**inputs)
    kinds = ("qfx::linear", "qfx::int8_")
    return found, sum(e.count for e in trace.key_averages() if e.key.startswith(kinds))
