"""Whole model: compares a whole call of a model in int8 and in float, by output and time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.ops.single_tensors import sqnr
from qfx.report.report_row import Row
from qfx.report.routing import (
    RoutingChange,
    blocks_of,
    choices_kept,
    routing_changes,
    routing_text,
)
from qfx.weights.model_restore import module_of, restore_later, unchanged

_TURNS = 5  # at most
_SECONDS = 2.0  # no turn begins later


@dataclass(frozen=True)
class WholeModel:
    """The comparison of a whole call of the model in int8 with one in float. `sqnr_db`: the SQNR of
    all float tensors of the output together; None if there are none. `float_s`, `int8_s`: median
    seconds of `turns` calls, in float and in int8 by turns. `float_side`, `int8_side`: what ran, in
    words. `why_not`: why nothing was measured; '' if it was. `routing`: how many choices of experts
    int8 changes, for each block of experts of the model."""

    sqnr_db: float | None = None
    float_s: float | None = None
    int8_s: float | None = None
    turns: int = 0
    float_side: str = ""
    int8_side: str = ""
    why_not: str = ""
    routing: tuple[RoutingChange, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether the model ran in int8 and in float."""
        return self.turns > 0

    @property
    def gain(self) -> float | None:
        """Time in float / time in int8."""
        return self.float_s / self.int8_s if self.float_s and self.int8_s else None

    @property
    def row(self) -> Row:
        """The row of the whole model, the last line of the table of matmuls."""
        reason = "" if self.gain is None else f"int8 measured {self.gain:.2f}x float; see below"
        given = (self.sqnr_db, self.float_s, self.int8_s)
        return Row("whole model", "", "", "", "", reason, *given, measured=True)

    def __str__(self) -> str:
        if self.float_s is None or self.int8_s is None:  # not measured
            return f"whole model: not measured, {self.why_not}"
        level = "" if self.sqnr_db is None else f"SQNR of the output {self.sqnr_db:.1f} dB, "
        times = f"{self.float_s * 1e3:.4g} ms in float, {self.int8_s * 1e3:.4g} ms in int8"
        return (
            f"whole model: {level}{times} ({self.gain:.2f}x), medians of {self.turns} in turns; "
            f"float: {self.float_side}; int8: {self.int8_side}"
        )

    @property
    def routing_text(self) -> str:
        """A line on the choices of experts; '' if the model has no block of experts, or was not
        run."""
        return routing_text(self.routing)


class CallInputs:
    """The arguments of a call, for running it several times. Tensors that a run writes to are
    restored. Objects that are neither tensors nor plain values, such as caches, are copied for each
    run."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copies the arguments. Raises the errors of `copy.deepcopy` for objects that cannot be
        copied."""
        self._kept: Any = _copied((tuple(args), dict(kwargs)))

    def restored(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments for one run inside the context `unchanged`, which restores their
        tensors."""
        args, kwargs = _copied(self._kept)
        restore_later(t for t in _leaves((args, kwargs)) if _is_dense(t))
        return args, kwargs


class Side(NamedTuple):
    """One of the two ways to call the model that are compared: in float, or in int8. `run` calls
    the model and returns its output, and the seconds of the whole call or, if only captured graphs
    are compared, of these graphs. `says`: what runs, in words. `called`: the model if its
    modules run, None if its captured graphs run."""

    run: Callable[..., tuple[Any, float]]
    says: str
    called: torch.nn.Module | None = None


def whole_model(model: Any, inputs: CallInputs, float_: Side, int8: Side) -> WholeModel:
    """Runs the model in float and in int8 by turns: first to compare the outputs, then to measure
    the times. The model is restored after each run, so that all runs begin in the same state."""
    sides = {"float_side": float_.says, "int8_side": int8.says}
    outputs, choices = [], []
    for side in (float_, int8):
        with choices_kept(side.called) as kept:
            outputs.append(_ran(model, inputs, side)[0])
        choices.append(kept)
    error = output_sqnr(*outputs)
    times: list[list[float]] = []
    end = time.perf_counter() + _SECONDS
    while not times or (len(times) < _TURNS and time.perf_counter() < end):
        times.append([_ran(model, inputs, side, keep=False)[1] for side in (float_, int8)])
    float_s, int8_s = (median(column) for column in zip(*times, strict=True))
    routing = routing_changes(blocks_of(module_of(model)), *choices)
    return WholeModel(error, float_s, int8_s, len(times), **sides, routing=routing)


def _ran(
    model: Any, inputs: CallInputs, side: Side, keep: bool = True
) -> tuple[list[Tensor], float]:
    with torch.no_grad(), unchanged(model, "explain"):
        args, kwargs = inputs.restored()
        output, seconds = side.run(*args, **kwargs)
        kept = floating(output) if keep else ()
        return [t.detach().ravel().cpu().clone() for t in kept], seconds


def output_sqnr(exact: Sequence[Tensor], noisy: Sequence[Tensor]) -> float | None:
    """Returns the SQNR in dB of all tensors together, over the elements that are finite in `exact`;
    None if there are no elements.

    Raises ValueError if the numbers of tensors or their sizes differ.
    """
    sizes = [[t.numel() for t in each] for each in (exact, noisy)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the outputs have tensors of {sizes[0]} and of {sizes[1]} elements")
    if not sum(sizes[0]):
        return None
    signal, found = torch.cat([*exact]), torch.cat([*noisy])
    finite = signal.isfinite()
    return sqnr(signal[finite], found[finite])


def floating(output: Any, name: str = "") -> Iterator[Tensor]:
    """Yields the float tensors of a model's output: a tensor, tuples, lists, dicts, data classes
    and the outputs of transformers. The keys and values of a cache are left out."""
    if name.startswith("past_"):
        return
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from floating(value, str(key))
    elif isinstance(output, list | tuple):
        for value in output:
            yield from floating(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from floating(getattr(output, field.name), field.name)


# Tensors are put back; a run of a model does not change the others.
_VALUES = (
    Tensor,
    torch.nn.Module,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    type,
)


def _copied(value: Any) -> Any:
    if isinstance(value, _VALUES) or callable(value):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return copy.deepcopy(value)


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple, dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _is_dense(value: Any) -> bool:
    plain = isinstance(value, Tensor) and value.layout is torch.strided
    return plain and not (value.is_nested or value.is_meta)
