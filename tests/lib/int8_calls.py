"""Counts the matmuls that run in int8 during a call of a function, by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def int8_matmuls(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Counter[str]]:
    """Returns the function's result, and how many matmuls each of our operators ran."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        result = function(*arguments)
    recorded: Any = trace.profiler
    found: Counter[str] = Counter()
    for event in recorded.kineto_results.events():
        if event.name().startswith("qfx::"):
            found[event.name()] += _matmuls(event)
    return result, found


def _matmuls(event: Any) -> int:
    """Returns the matmuls of a call. `linears` runs as many as its list of weights has; a call from
    generated code does not show them and counts as one."""
    shapes = event.structured_input_shapes()
    return len(shapes[1]) if event.name() == "qfx::linears" and shapes else 1
