"""The fuzz check: a program through torch.compile(backend="qfx") does what its source says.

It runs twice on the same module, a weight changed in between (`changes.py`). All outputs,
inputs written in place and buffers are compared with float64 within the bound that the data imply
(`tests/lib/bounds.py`), the number of int8 matmuls with the grammar's own count. Eager is held to
the bound without quantization, which keeps the rules of the grammar honest. Gradients exist where
eager has them and are finite.
"""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

import qfx
from tests.fuzz.changes import halve
from tests.fuzz.graphs import QUANTIZED, Interpreter, Program
from tests.fuzz.held import PUT_ON, found
from tests.lib.bounds import TINY, UNIT, Known
from tests.lib.int8_calls import int8_matmuls

LINEAR = tuple(f"qfx::linear{form}" for form in ("", "_dynamic", "_float", "_ste", "s"))
BMM = ("qfx::int8_bmm", "qfx::int8_bmm_dynamic")
ATTENTION = ("qfx::int8_attention",)


class Mismatch(AssertionError):
    """A compiled program that does not do what its source says."""


class BeyondBound(Mismatch):
    """By its numbers."""


@dataclass
class Seen:
    """What was checked: of `programs` programs, how many products there were, how many the grammar
    says are int8 and were, how many products of two activations and how many attentions were; `new`
    have modules, patterns, other batches or a `__getattr__` of their own; `trained` programs gave
    gradients, `refused` ones have none in eager either; and bound / value of every output."""

    programs: int = 0
    products: int = 0
    int8: int = 0
    int8_bmm: int = 0
    attentions: int = 0
    new: int = 0
    trained: int = 0
    refused: int = 0
    ratios: tuple[float, ...] = ()

    def __add__(self, other: Seen) -> Seen:
        return Seen(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios or [math.nan])

    def __str__(self) -> str:
        return (
            f"{self.programs} programs: {self.int8} + {self.int8_bmm} of {self.products} matmuls "
            f"int8, {self.attentions} attentions; {self.new} new; {self.trained} trained, "
            f"{self.refused} without gradients in eager; bound / value: median {self.ratio:.3f}"
        )


@contextmanager
def _all_that_is_legal() -> Iterator[None]:
    """Programs are small: int8 also where it does not suit their few features or their sines."""
    with (
        patch("qfx.plan.policy.why_excluded", lambda match: None),
        patch("qfx.nn.quantize_model.why_few_features", lambda k: None),
        patch("qfx.nn.quantize_model.why_few_inputs", lambda k, names: None),
    ):
        yield


def check(p: Program, inner: str = "eager", trains: bool = False) -> Seen:
    """Compares the compiled program with eager and the exact one. Raises Mismatch."""
    try:
        with _all_that_is_legal():
            seen = _check_inference(p, inner)
            _check_replaced(p)
            return seen + _check_training(p, inner) if trains else seen
    except Exception as error:
        kind = BeyondBound if isinstance(error, BeyondBound) else Mismatch
        raise kind(f"{type(error).__name__}: {error}\n\n{p}") from error


def _compiled(p: Program, module: nn.Module, inner: str) -> Callable[..., Any]:
    options = {"minimum_gain": 0, "scheme": p.scheme[0], "inner": inner}
    if p.chosen:
        options[p.chosen.option] = [p.chosen.pattern]
    return torch.compile(
        module, backend=qfx.backend, fullgraph=not p.breaks, dynamic=p.dynamic or None,
        options=options,
    )  # fmt: skip


def _check_inference(p: Program, inner: str) -> Seen:
    eager, ours = p.module(), p.module()
    function = _compiled(p, ours, inner)
    floats, codes = Interpreter(p, None), Interpreter(p, p.scheme[1])
    sizes = filter(None, map(p.of_size, p.batches))
    with torch.no_grad():
        for call, with_inputs in enumerate([p, p, *sizes]):
            arguments, copies = with_inputs.arguments(), with_inputs.arguments()
            expected = eager(*arguments)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="qfx failed")  # as faults of the pass are
                got, ran = counting(function, copies)
            exact_float, exact = floats.call(with_inputs), codes.call(with_inputs)
            names = [*p.outputs, *p.inputs]
            for i, name in enumerate(names):
                a, b = ((*r, *t)[i] for r, t in ((expected, arguments), (got, copies)))
                where = f"{name}, call {call}"
                _compare(f"eager's {where}", a, a, exact_float[name])
                _compare(where, b, a, exact[name])
            if inner == "eager":  # Inductor copies in dropout, with or without qfx
                _same_sharing([*expected, *arguments], [*got, *copies])
            if call == 1:  # the others compile
                _compare_counts(p, ran, inner)
                counted = ran
            _halve_a_weight(p, (eager, ours), (floats, codes))
        _compare_buffers(p, eager, ours, codes)
    ratios = tuple(_ratio(exact[n]) for n in p.outputs)
    return Seen(
        1, p.products, counted.linear, counted.bmm, counted.attention, p.is_new, ratios=ratios
    )


def _ratio(known: Known) -> float:
    """Bound over value, root mean squares."""
    value = float(known.v.square().mean().sqrt())
    return float(known.e.square().mean().sqrt()) / value if value else 0.0


class Ran(NamedTuple):
    """Int8 matmuls with weights, those of two activations, and attentions."""

    linear: int
    bmm: int
    attention: int


def counting(function: Callable[..., Any], arguments: Sequence[Tensor]) -> tuple[Any, Ran]:
    """The result, and what ran in int8."""
    result, found = int8_matmuls(function, *arguments)
    groups = (LINEAR, BMM, ATTENTION)
    return result, Ran(*(sum(found[name] for name in names) for names in groups))


def _compare_counts(p: Program, ran: Ran, inner: str) -> None:
    """Inductor drops results that nobody reads; an attention of symbolic features stays float."""
    for what, count, expected, fewest in (
        ("matmuls", ran.linear, p.int8, p.int8),
        ("attentions", ran.attention, p.attentions, 0 if p.dynamic else p.attentions),
    ):
        if not (fewest if inner == "eager" else 0) <= count <= expected:
            raise Mismatch(f"{count} int8 {what}, expected {expected}")


def _compare(where: str, got: Tensor, expected: Tensor, exact: Known) -> None:
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        raise Mismatch(f"{where}: {got.dtype} {got.shape} for {expected.dtype} {expected.shape}")
    error = (got.double() - exact.v).abs()
    within = error <= exact.e  # not for a NaN
    if not within.all():
        i = tuple(int(j) for j in (~within).nonzero()[0])
        kind = Mismatch if where.startswith("eager") else BeyondBound
        raise kind(
            f"{where}: element {list(i)} is {float(got[i])}, exactly {float(exact.v[i])}: "
            f"{float(error[i]):.3g} away, bound {float(exact.e[i]):.3g}; "
            f"{int((~within).sum())} of {within.numel()} elements"
        )


def _same_sharing(expected: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    """Which outputs and inputs share memory."""
    for i, j in itertools.combinations(range(len(expected)), 2):
        shared = [t[i].data_ptr() == t[j].data_ptr() for t in (expected, got)]
        if shared[0] != shared[1]:
            raise Mismatch(f"outputs and inputs {i} and {j} share memory in eager: {shared[0]}")


def _halve_a_weight(
    p: Program, modules: Sequence[nn.Module], interpreters: Sequence[Interpreter]
) -> None:
    """As a user would, between two calls: packed weights must follow."""
    names = [s.weight for s in p.steps if s.weight]
    if names:
        for module in modules:
            halve(module, p.paths[names[0]], p.change)
        rounding = TINY[UNIT[p.state[names[0]][1].dtype]]  # of subnormal numbers
        for interpreter in interpreters:
            getattr(interpreter.exact["self"], names[0]).mul_(0.5)
            getattr(interpreter.errors["self"], names[0]).mul_(0.5).add_(rounding)


def _compare_buffers(p: Program, eager: nn.Module, ours: nn.Module, exact: Interpreter) -> None:
    for name, (kind, _) in p.state.items():
        if kind == "buffer":
            a, b = (found(module, p.paths[name]) for module in (eager, ours))
            _compare(f"buffer {name}", b, a, exact.known(f"self.{name}"))


# --- int8 modules ---


def _check_replaced(p: Program) -> None:
    """Linears as `quantize_` leaves them: within the bound, float with a warning, or refused."""
    linears = [h for h in p.holdings if h.put_on]
    weights = [p.state[next(iter(h.tensors))][1] for h in linears]
    served = [h for h, w in zip(linears, weights, strict=True) if w.dtype in QUANTIZED]
    if not served or p.ties(linears):
        return
    module, config = p.module(), qfx.Config(scheme=p.scheme[0])
    fates = Counter(PUT_ON[str(h.put_on)].fate for h in served)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"qfx\.quantize_: ")  # some linears stay
        try:
            qfx.quantize_(module, config)
        except ValueError as why:
            if fates["replaced"] and not fates["refused"]:
                raise Mismatch(f"quantize_: {why}") from None
            return
    made = sum(isinstance(m, qfx.nn.Linear) for m in module.modules())
    if fates["refused"] or made != fates["replaced"]:
        raise Mismatch(f"quantize_ made {made} int8 modules of {dict(fates)}")
    exact, arguments = Interpreter(replace(p, chosen=None), p.scheme[1]).call(), p.arguments()
    with torch.no_grad():
        outputs = module(*arguments)
    for name, output in zip(p.outputs, outputs, strict=True):
        _compare(f"{name} of int8 modules", output, output, exact[name])


# --- training ---


def _check_training(p: Program, inner: str) -> Seen:
    """Gradients where eager has them, finite; the forward within the same bound."""
    for of_inputs in (True, False):
        eager, ours = p.module(), p.module()
        arguments, copies = (_recording(p, of_inputs) for _ in range(2))
        try:
            expected = _backward(eager, arguments)
        except RuntimeError:  # what backward needs was overwritten, or nothing records gradients
            continue
        got = _backward(_compiled(p, ours, inner), copies)
        exact = Interpreter(p, p.scheme[1]).call()
        for name, a, b in zip(p.outputs, expected, got, strict=True):
            _compare(f"{name} in training", b.detach(), a.detach(), exact[name])
        leaves = {n: t for n, t in zip(p.inputs, arguments, strict=True)}
        leaves |= dict(eager.named_parameters())
        mine = {**dict(zip(p.inputs, copies, strict=True)), **dict(ours.named_parameters())}
        for name, leaf in leaves.items():
            if leaf.is_leaf:  # an input written through a view is none
                _compare_gradient(name, leaf.grad, mine[name].grad)
        return Seen(trained=1)
    return Seen(refused=1)


def _recording(p: Program, record: bool) -> list[Tensor]:
    return [a.requires_grad_(record) for a in p.arguments()]


def _backward(f: Callable[..., Any], arguments: Sequence[Tensor]) -> Any:
    outputs = f(*arguments)
    sum(o.double().square().mean() for o in outputs).backward()
    return outputs


def _compare_gradient(name: str, expected: Tensor | None, got: Tensor | None) -> None:
    if (expected is None) != (got is None):
        raise Mismatch(f"gradient of {name}: {got is not None}, in eager {expected is not None}")
    if expected is None or got is None:
        return
    if (got.shape, got.dtype) != (expected.shape, expected.dtype) or not got.isfinite().all():
        raise Mismatch(f"gradient of {name}: {got.dtype} {list(got.shape)}, or not finite")
