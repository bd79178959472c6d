"""`qfx bench`: a model in float, under Inductor and in int8, by turns in one run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from qfx.command.open_model import OpenedModel
from qfx.report.whole_model import floating, output_sqnr

WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "Inductor": {"backend": "inductor"},
    "qfx": {"backend": "qfx"},
    "qfx, inner=program": {"backend": "qfx", "options": {"inner": "program"}},
}


@dataclass(frozen=True)
class Timing:
    """One way to run a model. Seconds from the start to the first result, median seconds of a call,
    the SQNR of the output to that of eager mode in dB, or why it does not run."""

    way: str
    first_s: float | None = None
    call_s: float | None = None
    sqnr_db: float | None = None
    reason: str = ""


def timings(
    opened: OpenedModel, options: dict[str, Any], rounds: int, said: Callable[[str], None]
) -> list[Timing]:
    """Runs each way once, then all that ran by turns. `options`: of the backend. `said` gets the
    name of the way that is being compiled."""
    found: dict[str, Timing] = {}
    runs: dict[str, Callable[[], Any]] = {}
    outputs: dict[str, Any] = {}
    for way, how in WAYS.items():
        said(way)
        try:
            runs[way], first, outputs[way] = _started(opened, how, options)
        except Exception as why:  # compilers raise anything
            found[way] = Timing(way, reason=f"{type(why).__name__}: {str(why).splitlines()[0]}")
        else:
            found[way] = Timing(way, first, None, output_sqnr(outputs["eager"], outputs[way]))
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(rounds):
        for way, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - start)
    return [_with_call(timing, seconds.get(timing.way)) for timing in found.values()]


def _with_call(timing: Timing, seconds: list[float] | None) -> Timing:
    if not seconds:
        return timing
    db = None if timing.way == "eager" else timing.sqnr_db
    return Timing(timing.way, timing.first_s, median(seconds), db)


def _started(
    opened: OpenedModel, how: dict[str, Any] | None, options: dict[str, Any]
) -> tuple[Callable[[], Any], float, list[torch.Tensor]]:
    model: nn.Module = opened.model
    start = time.perf_counter()
    if how is not None:
        given = dict(how)
        if given["backend"] == "qfx":
            given["options"] = {**options, **given.get("options", {})}
        model = torch.compile(copy.deepcopy(model), **given)  # type: ignore[assignment]

    def run() -> Any:
        with torch.no_grad():
            return model(*opened.args, **opened.kwargs)

    output = [tensor.clone() for tensor in floating(run())]
    return run, time.perf_counter() - start, output
