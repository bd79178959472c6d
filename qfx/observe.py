"""Observe: run a captured graph in float and, beside each int8 site, its int8 form."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import qfx._C as _C
from qfx.attention import Attention
from qfx.canonical import rewrite
from qfx.capture import attribute
from qfx.form_cost import form
from qfx.fuse import fuse
from qfx.ops.quantize import ACTIVATIONS
from qfx.plan import Entry, Plan, hint
from qfx.products import Product
from qfx.provide import as_constants
from qfx.site import Site, Unmatched
from qfx.timing import medians
from qfx.views import apply

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


class Observer(fx.Interpreter):
    """Runs a float graph and, beside each site the plan quantizes, its int8 form."""

    def __init__(self, gm: fx.GraphModule, plan: Plan) -> None:
        super().__init__(gm)
        self.entries = plan.entries
        sites = [(e, e.match) for e in self.entries if e.scheme and isinstance(e.match, Site)]
        self.products = {
            e.match.node: (e, e.match) for e in self.entries if isinstance(e.match, Product)
        }
        self.attentions = {
            e.match.node: (e, e.match) for e in self.entries if isinstance(e.match, Attention)
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
        if n in self.attentions:
            self._run_attention(*self.attentions[n], result)
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
        given, w = self.env[site.x], self._constant(site.weight)
        x = apply(site.x_view, given)
        bias = None if site.bias is None else self._constant(site.bias)
        dtype = site.out_dtype or w.dtype
        w_nk = apply(site.view, w).to(dtype)
        activation = ACTIVATIONS[site.activation]
        alone = int8_form(entry, site, given, w, bias).forward

        def in_float() -> Tensor:
            return activation(F.linear(x.to(dtype), w_nk, None if bias is None else bias.to(dtype)))

        float_s, int8_s = medians(in_float, lambda: alone(given), rounds=_ROUNDS)
        return alone(given), float_s, int8_s

    def _run_product(self, entry: Entry, product: Product, result: Tensor) -> None:
        if entry.scheme is None:
            return
        spec, a, b = entry.scheme.x, self.env[product.a], self.env[product.b]
        assert spec is not None
        a, b = apply(product.a_view, a), apply(product.b_view, b)
        how = (list(spec.axes), spec.bits, spec.symmetric, entry.scheme.w.bits, product.dtype)
        exact = a @ b.mT
        float_s, int8_s = medians(
            lambda: a @ b.mT, lambda: torch.ops.qfx.int8_bmm_dynamic(a, b, *how), rounds=_ROUNDS
        )
        error = sqnr(exact, torch.ops.qfx.int8_bmm_dynamic(a, b, *how))
        self.measured[product.node] = _row(entry, error, float_s, int8_s)

    def _run_attention(self, entry: Entry, attention: Attention, result: Tensor) -> None:
        if entry.scheme is None:
            return
        q, k, v = (self.env[n] for n in (attention.query, attention.key, attention.val))
        mask = None if attention.mask is None else self.env[attention.mask]
        scale, causal = attention.scale, attention.causal

        def in_float() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale)

        def in_int8() -> Tensor:
            return torch.ops.qfx.int8_attention(q, k, v, mask, scale, causal, attention.dtype)

        seconds = medians(in_float, in_int8, rounds=_ROUNDS)
        self.measured[attention.node] = _row(entry, sqnr(result, in_int8()), *seconds)

    def _constant(self, node: fx.Node) -> Tensor:
        if self.constants[node] is None:  # it stands later in the graph
            self.constants[node] = attribute(node)
        return self.constants[node]  # type: ignore[return-value]


def int8_form(
    entry: Entry, site: Site, x: Tensor, w: Tensor, bias: Tensor | None
) -> fx.GraphModule:
    """A graph of x alone that computes the entry's site on these constants, as a rewrite does."""
    graph = fx.Graph()
    holder = nn.Module()
    holder.register_buffer("w", w.detach())
    holder.register_buffer("b", None if bias is None else bias.detach())
    source = graph.placeholder("x")
    weight, b = graph.get_attr("w"), None if bias is None else graph.get_attr("b")
    matmul = graph.call_function(F.linear, (source, weight, b))
    graph.output(matmul)
    for node, tensor in ((source, x), (weight, w)):
        node.meta["val"] = tensor.detach()
    alone = replace(site, node=matmul, out=matmul, x=source, weight=weight, bias=b, trains=False)
    gm = fx.GraphModule(holder, graph)
    rewrite(gm, Plan((replace(entry, match=alone),)), as_constants(gm))
    return fuse(gm)


def sqnr(signal: Tensor, noisy: Tensor) -> float:
    """Signal to quantization noise ratio in dB, 10 log10(sum s^2 / sum (s - n)^2)."""
    s, n = signal.double(), noisy.double()
    noise, power = (s - n).square().sum().item(), s.square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(power / noise) if power else -math.inf


def _kernel(entry: Entry) -> str:
    """The GEMM kernel of the site: tile and instruction set; the latter alone of other forms."""
    assert entry.scheme is not None
    m = None if isinstance(entry.match, Unmatched) else hint(entry.match.m)
    return (
        _C.isa() if m is None or form(entry.scheme) else _C.kernel_for(m).removeprefix("s8s8_gemm_")
    )


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
