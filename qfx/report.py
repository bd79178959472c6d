"""explain: every matmul of a model on given inputs: int8 or why not, kernel, error, time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, fx, nn

import qfx._C as _C
from qfx.capture import attribute, clone, trace
from qfx.config import Config, parse_options
from qfx.cost import MachineCost, medians
from qfx.frame import prefixes
from qfx.match import Site, Unmatched, match
from qfx.opened import open_operators
from qfx.ops.quantize import ACTIVATIONS
from qfx.plan import Entry, Plan, check_patterns, decide, hint
from qfx.products import Product
from qfx.views import apply
from qfx.weights import pack

_ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """One matmul. Times in seconds for one call, `measured` on the given input or else predicted.

    `sqnr_db`: signal to quantization noise of this site's output alone, its input being exact.
    """

    module: str
    node: str
    shape: str
    scheme: str
    kernel: str
    reason: str
    sqnr_db: float | None = None
    float_s: float | None = None
    int8_s: float | None = None
    measured: bool = False


@dataclass(frozen=True)
class Report:
    """What `explain` found; prints as a table. `graphs`: how many graphs the model was cut into."""

    rows: tuple[Row, ...]
    graphs: int

    @property
    def quantized(self) -> int:
        return sum(r.scheme != "float" for r in self.rows)

    @property
    def total(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        table = [_printed(row) for row in self.rows]
        text = tabulate(table, headers="keys", disable_numparse=True)
        note = "times: measured on this input; ~ predicted by the cost model"
        count = f"{self.quantized} of {self.total} matmuls in int8, {self.graphs} graph(s)"
        return f"{text}\n{note}\n{count}"


def _printed(row: Row) -> dict[str, str]:
    return {
        "module": row.module,
        "node": row.node,
        "MxKxN": row.shape,
        "scheme": row.scheme,
        "kernel": row.kernel,
        "SQNR dB": "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
        "float us": _us(row, row.float_s),
        "int8 us": _us(row, row.int8_s),
        "reason": row.reason,
    }


def _us(row: Row, seconds: float | None) -> str:
    return "" if seconds is None else f"{'' if row.measured else '~'}{seconds * 1e6:.0f}"


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    **keyword_inputs: Any,
) -> Report:
    """Runs `model(*inputs, **keyword_inputs)` once in float and reports on each of its matmuls.

    `model`: a module or function for `torch.compile`, or an `fx.GraphModule`, which is taken as it
    is. `options`: as for the backend. Every site the plan quantizes is also run in int8 on its real
    input, for its SQNR and the time of both forms. Raises ValueError for a wrong option.
    """
    config, _ = parse_options(options)
    session = _Session(config, [])
    token = _SESSION.set(session)
    try:
        with torch.no_grad():
            if isinstance(model, fx.GraphModule):
                _look(trace(model, *inputs))(*inputs)
            else:
                plain = _uncompiled(model)
                torch.compile(plain, backend=_look, dynamic=False)(*inputs, **keyword_inputs)
    finally:
        _SESSION.reset(token)
    if not session.graphs:
        warnings.warn(
            "qfx.explain saw no graph: torch.compile does not capture this callable, or has "
            "reached its recompile limit for it (torch._dynamo.reset() clears that)",
            stacklevel=2,
        )
    if isinstance(model, nn.Module):
        _check(config, model)
    rows = tuple(row for graph in session.graphs for row in graph.rows())
    return Report(rows, len(session.graphs))


class _Session(NamedTuple):
    """One call of `explain`: what to decide by, and what was seen."""

    config: Config
    graphs: list[_Observer]


_SESSION: ContextVar[_Session] = ContextVar("session")


def _look(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> Callable[..., Any]:
    """The backend of `explain`. One function for all calls: a second one reuses Dynamo's code."""
    graph = open_operators(clone(gm))
    matches = match(graph, prefixes())

    def run(*arguments: Any) -> Any:
        session = _SESSION.get()
        observer = _Observer(graph, decide(matches, session.config, MachineCost()))
        session.graphs.append(observer)
        return observer.run(*arguments)

    return torch._dynamo.disable(run)


def _uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model under `torch.compile(model)` or `model.compile()`."""
    model = getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", model))
    if getattr(model, "_compiled_call_impl", None) is not None:
        return model.forward  # type: ignore[union-attr]
    return model


def _check(config: Config, model: nn.Module) -> None:
    modules = [name for name, _ in model.named_modules() if name]
    check_patterns(
        config, modules + [name for name, _ in model.named_parameters(remove_duplicate=False)]
    )


class _Observer(fx.Interpreter):
    """Runs a float graph and, beside each site the plan quantizes, its int8 form."""

    def __init__(self, gm: fx.GraphModule, plan: Plan) -> None:
        super().__init__(gm)
        self.entries = plan.entries
        sites = [(e, e.match) for e in self.entries if e.scheme and isinstance(e.match, Site)]
        self.products = {
            e.match.node: (e, e.match) for e in self.entries if isinstance(e.match, Product)
        }
        self.starts = {site.node: (entry, site) for entry, site in sites}
        self.ends = {site.out: site.node for _, site in sites}
        self.constants = {n: None for _, s in sites for n in (s.weight, s.bias) if n is not None}
        self.int8: dict[fx.Node, tuple[Tensor, float, float]] = {}  # output, seconds in both forms
        self.measured: dict[fx.Node, Row] = {}

    def rows(self) -> list[Row]:
        return [self.measured.get(e.match.node) or _row(e) for e in self.entries]

    def run_node(self, n: fx.Node) -> Any:
        if n in self.starts:
            self.int8[n] = self._run_int8(*self.starts[n])
        result = super().run_node(n)
        if n in self.products:
            self._run_product(*self.products[n], result)
        if n in self.constants:
            self.constants[n] = result
        if n in self.ends:
            start = self.ends[n]
            output, float_s, int8_s = self.int8.pop(start)
            row = _row(self.starts[start][0], sqnr(result, output), float_s, int8_s)
            self.measured[start] = row
        return result

    def _run_int8(self, entry: Entry, site: Site) -> tuple[Tensor, float, float]:
        assert entry.scheme is not None
        spec, w = entry.scheme.x, self._constant(site.weight)
        x = apply(site.x_view, self.env[site.x])
        bias = None if site.bias is None else self._constant(site.bias)
        dtype = site.out_dtype or w.dtype
        w_nk = apply(site.view, w).to(dtype)
        packed = pack(w, site.view, entry.scheme.w)
        activation = ACTIVATIONS[site.activation]
        same = (list(spec.axes), spec.bits, spec.symmetric, site.activation, dtype)

        def in_float() -> Tensor:
            return activation(F.linear(x.to(dtype), w_nk, None if bias is None else bias.to(dtype)))

        def in_int8() -> Tensor:
            return torch.ops.qfx.int8_linear_dynamic(x, *packed, bias, *same)

        float_s, int8_s = medians(in_float, in_int8, rounds=_ROUNDS)
        return apply(site.y_view, in_int8()), float_s, int8_s

    def _run_product(self, entry: Entry, product: Product, result: Tensor) -> None:
        if entry.scheme is None:
            return
        spec, a, b = entry.scheme.x, self.env[product.a], self.env[product.b]
        a, b = apply(product.a_view, a), apply(product.b_view, b)
        how = (list(spec.axes), spec.bits, spec.symmetric, entry.scheme.w.bits, product.dtype)
        exact = a @ b.mT
        float_s, int8_s = medians(
            lambda: a @ b.mT, lambda: torch.ops.qfx.int8_bmm_dynamic(a, b, *how), rounds=_ROUNDS
        )
        error = sqnr(exact, torch.ops.qfx.int8_bmm_dynamic(a, b, *how))
        self.measured[product.node] = _row(entry, error, float_s, int8_s)

    def _constant(self, node: fx.Node) -> Tensor:
        if self.constants[node] is None:  # it stands later in the graph
            self.constants[node] = attribute(node)
        return self.constants[node]  # type: ignore[return-value]


def sqnr(signal: Tensor, noisy: Tensor) -> float:
    """Signal to quantization noise ratio in dB, 10 log10(sum s^2 / sum (s - n)^2)."""
    s, n = signal.double(), noisy.double()
    noise, power = (s - n).square().sum().item(), s.square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(power / noise) if power else -math.inf


def _kernel(entry: Entry) -> str:
    """The GEMM kernel of the site: tile and instruction set."""
    m = None if isinstance(entry.match, Unmatched) else hint(entry.match.m)
    return _C.isa() if m is None else _C.kernel_for(m).removeprefix("s8s8_gemm_")


def _row(
    entry: Entry,
    sqnr_db: float | None = None,
    float_s: float | None = None,
    int8_s: float | None = None,
) -> Row:
    estimate = entry.estimate
    measured = float_s is not None
    if not measured and estimate is not None:
        float_s, int8_s = estimate.float_s, estimate.int8_s
    return Row(
        module=entry.match.path,
        node=entry.match.node.name,
        shape=entry.shape,
        scheme=str(entry.scheme or "float"),
        kernel="" if entry.scheme is None else _kernel(entry),
        reason=entry.reason,
        sqnr_db=sqnr_db,
        float_s=float_s,
        int8_s=int8_s,
        measured=measured,
    )
