"""The time of a decode step by part, from PyTorch's profiler.

A profiled step is slower than others, so only shares are taken from the profile. Each event's own
time belongs to one part, and a part's time is the median over some steps. Guards are what the
profiler calls the lookup of compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

STEP = "decode step"
SIZES = {"float": 4, "signed char": 1, "unsigned char": 1, "c10::BFloat16": 2, "int": 4, "long": 8}
LINEARS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", "mkl::_mkl_linear")
# The first that is in the event's name.
PARTS = {
    "linears": (*LINEARS, "aten::linear", "aten::bmm", "linear"),
    "attention": ("attention", "attend"),
    "guards": ("TorchDynamo Cache Lookup",),
    "python": (
        "Torch-Compiled Region",
        "Pregraph bytecode",
        "CompiledFunction",
        "AOTDispatcher",
        "Runtime Wrapper",
    ),
}
NAMES = (*PARTS, "graph")


def part(name: str, outside: str) -> str:
    """Returns the part that an event belongs to. `outside`: the part for the time of a step outside
    operators."""
    if name == STEP:
        return outside
    return next((p for p, words in PARTS.items() if any(w in name for w in words)), "graph")


def shares(run: Callable[[], Any], steps: int, outside: str) -> tuple[dict[str, float], int]:
    """Returns the parts of a step, which add up to 1, and the bytes of weights that its linears
    read. `run` is one step."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        for _ in range(steps):
            with record_function(STEP):
                run()
    totals: list[dict[str, float]] = []
    events = sorted(found.events(), key=lambda e: e.time_range.start)
    for step in (e for e in events if e.name == STEP):
        total = dict.fromkeys(NAMES, 0.0)
        for e in events:
            if step.time_range.start <= e.time_range.start < step.time_range.end:
                total[part(e.name, outside)] += e.self_cpu_time_total
        totals.append(total)
    middle = {name: median(t[name] for t in totals) for name in NAMES}
    whole = sum(middle.values())
    return {name: value / whole for name, value in middle.items()}, _weights(found) // steps


def _weights(found: profile) -> int:
    """Returns the bytes of the tensors passed to linears; with one row those of activations are
    few. Views that an operator takes itself are not counted, only the operator is."""
    results: Any = found.profiler
    return sum(
        sum(map(_size, event.structured_input_shapes(), event.dtypes()))
        for event in results.kineto_results.events()
        if event.name() in LINEARS
        or (event.name().startswith("qfx::") and "linear" in event.name())
    )


def _size(shape: list[Any], dtype: str) -> int:
    """Returns the bytes of a tensor, or of a list of tensors, which contains packed weights."""
    if dtype == "TensorList":
        return sum(_size(each, "signed char") for each in shape)
    count = SIZES.get(dtype, 0) if shape else 0
    for size in shape:
        count *= size
    return count
