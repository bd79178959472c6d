"""Runs a captured graph in float, and each matmul that becomes int8 also in int8."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from qfx.cost.timing import medians
from qfx.graph.activations import activate
from qfx.graph.capture import attribute
from qfx.graph.views import apply
from qfx.host.operators import HigherOrderOperator
from qfx.host.shapes import hint
from qfx.match.attention import Attention
from qfx.match.base import FLOAT
from qfx.match.experts import ExpertProduct
from qfx.match.grouped import GroupedConvolution
from qfx.match.norm import Norm, folded
from qfx.match.operator_calls import OwnCall
from qfx.match.products import Product
from qfx.match.recurrent import RecurrentSteps
from qfx.match.site import Site
from qfx.nn.attention_gradients import gradient_cosine
from qfx.ops.forms import EXPERTS, GRU, LSTM, of_scheme
from qfx.ops.guard_counts import GuardCount, taken
from qfx.ops.single_tensors import sqnr
from qfx.pipeline import Context, run_passes
from qfx.plan.plan import Entry, Plan
from qfx.report.grouped_trial import grouped_form
from qfx.report.report_row import Range, Row, SiteMeasurement, range_of, row_of
from qfx.rewriting.expert_calls import packing_of
from qfx.rewriting.recurrent_calls import packing_of_steps
from qfx.values.config import Config
from qfx.weights.cache import pack

_ROUNDS = 3
TRIAL = "qfx.explain"  # what guarded sites count under, until they are taken


class _Tried(NamedTuple):
    """The result of running a matmul in int8 on its input: its output, the seconds of a call in
    float and in int8, and the counts of its guard."""

    output: Tensor
    float_s: float
    int8_s: float
    guarded: GuardCount | None


class SideBySide(fx.Interpreter):
    """Runs a float graph, and measures each matmul that the plan quantizes: on its input in float
    and in int8."""

    def __init__(self, gm: fx.GraphModule, plan: Plan, gradients: bool = False) -> None:
        """`gradients`: measure those of attentions too."""
        super().__init__(gm)
        self.gradients = gradients
        self.entries = plan.entries
        sites = [(site, entry) for site, entry in plan.of(Site) if entry.scheme]
        self.products = {m.node: (m, e) for m, e in plan.of(Product) if e.scheme}
        self.attentions = {m.node: (m, e) for m, e in plan.of(Attention) if e.scheme}
        self.experts = {m.node: (m, e) for m, e in plan.of(ExpertProduct) if e.scheme}
        self.steps = {m.node: (m, e) for m, e in plan.of(RecurrentSteps) if e.scheme}
        grouped = [(m, e) for m, e in plan.of(GroupedConvolution) if e.scheme]
        self.groups = {m.site.node: (m, e) for m, e in grouped}
        self.starts = {site.node: (site, entry) for site, entry in sites}
        self.ends = {site.out: site.node for site, _ in sites}
        self.constants = {n: None for s, _ in sites for n in _constants(s) if n is not None}
        self.constants |= {m.site.weight: None for m, _ in self.experts.values()}
        self.constants |= {
            n: None
            for m, _ in self.steps.values()
            for n in (m.site.weight, m.site.bias)
            if n is not None
        }
        self.int8: dict[fx.Node, _Tried] = {}
        self.lefts = {e.match.node: left for e in self.entries if (left := e.match.left)}
        self.ranges: dict[fx.Node, Range] = {}
        self.measured: dict[fx.Node, SiteMeasurement] = {}
        self.macs: dict[fx.Node, int] = {}
        for experts, _ in self.experts.values():
            self._keep({n for n in (experts.rows.numbers,) if n is not None}, experts.node)
        for found, _ in grouped:
            self._keep({*found.site.node.all_input_nodes}, found.site.node)
        for attention, _ in plan.of(Attention):
            node = attention.node
            self._keep({attention.key, attention.val} - {*node.all_input_nodes}, node)

    def _keep(self, sources: set[fx.Node], reader: fx.Node) -> None:
        """Keeps the values of the nodes `sources` until the node `reader` has run: measuring
        `reader` uses them, although the graph does not need them any more by then."""
        place = {n: i for i, n in enumerate(self.graph.nodes)}
        for user, read in list(self.user_to_last_uses.items()):
            if reader in place and place[user] < place[reader]:
                early = [n for n in read if n in sources]
                self.user_to_last_uses[user] = [n for n in read if n not in sources]
                self.user_to_last_uses.setdefault(reader, []).extend(early)

    def rows(self) -> list[Row]:
        nodes = [entry.match.node for entry in self.entries]
        found = zip(
            self.entries, map(self.ranges.get, nodes), map(self.measured.get, nodes), strict=True
        )
        return [row_of(*row) for row in found]

    def multiplied(self) -> tuple[int, int, int]:
        """Returns three numbers: the multiply-accumulates of what becomes int8, the
        multiply-accumulates of the whole graph, and the number of matmuls that are not counted
        because their multiply-accumulates are unknown, such as recurrent cells. The second number
        is what PyTorch counts, plus grouped matmuls and the model's own int8 operators."""
        own = {e.match.node: _sizes(e) for e in self.entries if isinstance(e.match, OwnCall)}
        macs = self.macs | own
        quantized = [e.match.node for e in self.entries if e.token != FLOAT]
        unknown = sum(not macs.get(entry.match.node) for entry in self.entries)
        return sum(macs.get(node, 0) for node in quantized), sum(macs.values()), unknown

    def run_node(self, n: fx.Node) -> Any:
        if n in self.lefts:
            source, view = self.lefts[n]
            self.ranges[n] = range_of(apply(view, self.env[source]))
        if n in self.starts:
            self.int8[n] = self._run_int8(*self.starts[n])
        result = self._counted(n)
        if n in self.products:
            self._run_product(*self.products[n], result)
        if n in self.attentions:
            self._run_attention(*self.attentions[n], result)
        if n in self.experts:
            self._run_experts(*self.experts[n], result)
        if n in self.steps:
            self._run_steps(*self.steps[n], result[0])
        if n in self.groups:
            self._run_groups(*self.groups[n], result)
        if n in self.constants:
            self.constants[n] = result
        if n in self.ends:
            start = self.ends[n]
            output, float_s, int8_s, guarded = self.int8.pop(start)
            self.measured[start] = SiteMeasurement(sqnr(result, output), float_s, int8_s, guarded)
        return result

    def _counted(self, n: fx.Node) -> Any:
        """Runs a node in float and counts its multiply-accumulates. Those in the subgraphs of
        higher-order operators, which PyTorch's counter does not run, are not counted."""
        if isinstance(n.target, HigherOrderOperator):
            return super().run_node(n)
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        self.macs[n] = counter.get_total_flops() // 2
        if not self.macs[n] and "grouped_mm" in str(n.target) and isinstance(result, Tensor):
            rows = self.env[n.all_input_nodes[0]]  # each [K] is multiplied by one expert's [K, N]
            self.macs[n] = result.numel() * int(rows.shape[-1])
        return result

    def _run_int8(self, site: Site, entry: Entry) -> _Tried:
        assert entry.scheme is not None
        given, w = self.env[site.x], self._constant(site.weight)
        bias = None if site.bias is None else self._constant(site.bias)
        if site.norm is not None:
            site, w, bias = self._with_folded_norm(site, site.norm, w, bias)
        guard = entry.guard and entry.guard._replace(site=TRIAL)
        alone = int8_form(replace(entry, guard=guard), site, given, w, bias).forward

        in_float = self._in_float(site, given, w, bias)
        float_s, int8_s = medians(in_float, lambda: alone(given), rounds=_ROUNDS)
        taken(TRIAL)
        return _Tried(alone(given), float_s, int8_s, taken(TRIAL) if guard else None)

    def _with_folded_norm(
        self, site: Site, norm: Norm, w: Tensor, bias: Tensor | None
    ) -> tuple[Site, Tensor, Tensor]:
        """Returns the match, the weight and the bias of a matmul that contain the batch norm after
        it."""
        values = [None if n is None else self._constant(n) for n in norm.constants]
        w, b = folded(apply(site.view, w), bias, norm.eps, site.bias_view, *values)
        bias_node = site.bias or norm.mean
        return replace(site, view=(), bias_view=(), norm=None, bias=bias_node), w, b

    def _in_float(
        self, site: Site, x: Tensor, w: Tensor, bias: Tensor | None
    ) -> Callable[[], Tensor]:
        """Returns a function that computes the matmul in float: a convolution as the model calls
        it, everything else as a linear."""
        dtype = site.out_dtype or w.dtype
        if any(method == "im2col" for method, _ in site.x_view):
            run: Any = site.node.target
            args, kwargs = self.fetch_args_kwargs_from_env(site.node)
            return lambda: activate(site.activation, run(*args, **kwargs))
        rows, w_nk = apply(site.x_view, x).to(dtype), apply(site.view, w).to(dtype)
        b = None if bias is None else apply(site.bias_view, bias).to(dtype)
        return lambda: activate(site.activation, F.linear(rows, w_nk, b))

    def _run_product(self, product: Product, entry: Entry, result: Tensor) -> None:
        assert entry.scheme is not None and entry.scheme.x is not None
        spec, a, b = entry.scheme.x, self.env[product.a], self.env[product.b]
        a, b = apply(product.a_view, a), apply(product.b_view, b)
        how = (list(spec.axes), spec.bits, spec.symmetric, entry.scheme.w.bits, product.dtype)
        exact = a @ b.mT
        float_s, int8_s = medians(
            lambda: a @ b.mT, lambda: torch.ops.qfx.int8_bmm_dynamic(a, b, *how), rounds=_ROUNDS
        )
        error = sqnr(exact, torch.ops.qfx.int8_bmm_dynamic(a, b, *how))
        self.measured[product.node] = SiteMeasurement(error, float_s, int8_s)

    def _run_attention(self, attention: Attention, entry: Entry, result: Tensor) -> None:
        q, k, v = (self.env[n] for n in (attention.query, attention.key, attention.val))
        mask = None if attention.mask is None else self.env[attention.mask]
        scale, causal, gqa = attention.scale, attention.causal, attention.gqa

        def in_float() -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa
            )

        def in_int8() -> Tensor:
            return torch.ops.qfx.int8_attention(q, k, v, mask, scale, causal, attention.dtype)

        float_s, int8_s = medians(in_float, in_int8, rounds=_ROUNDS)
        found = SiteMeasurement(sqnr(result, in_int8()), float_s, int8_s)
        if self.gradients:
            given = (q, k, v, mask, scale, causal)
            found = found._replace(gradient_cosine=gradient_cosine(*given, gqa))
        self.measured[attention.node] = found

    def _run_experts(self, found: ExpertProduct, entry: Entry, result: Tensor) -> None:
        assert entry.scheme is not None
        site, block = found.site, entry.scheme.block(found.k)
        x = apply(found.site.x_view, self.env[found.site.x])
        given = found.sorted(x, self.env.__getitem__)
        x, ends = given.rows, given.offsets
        w_enk = apply(site.view, self._constant(site.weight).detach())
        weight = pack(w_enk, (), packing_of(entry, entry.scheme, found.k)).weight
        values = {"x": x, "weight": weight, "offsets": ends, "bias": None, "activation": "none"}
        values |= {"out_dtype": result.dtype} | of_scheme(entry.scheme, found.n, block)
        places = [0, *ends.tolist()]

        def in_float() -> list[Tensor]:
            each = enumerate(pairwise(places))
            return [x[begin:end] @ w_enk[e].t() for e, (begin, end) in each if begin < end]

        float_s, int8_s = medians(in_float, lambda: EXPERTS(values), rounds=_ROUNDS)
        exact, count = in_float(), places[-1]  # the rows after these are of no expert
        error = sqnr(torch.cat(exact), EXPERTS(values)[:count]) if exact else None
        self.measured[found.node] = SiteMeasurement(error, float_s, int8_s)

    def _run_steps(self, found: RecurrentSteps, entry: Entry, result: Tensor) -> None:
        assert entry.scheme is not None
        site, scheme, read = found.site, entry.scheme, found.arguments
        w_nk = apply(site.view, self._constant(site.weight).detach())
        bias = None if site.bias is None else self._constant(site.bias).detach()
        given = {name: self.env[read[name]] for name in ("x", "h", "c") if name in read}
        weight = pack(w_nk, (), packing_of_steps(scheme, found.k)).weight
        values = {**read, **given, "weight": weight, "bias": bias, "out_dtype": result.dtype}
        values |= of_scheme(scheme, found.n, scheme.block(found.k))
        in_int8, in_float = LSTM if "c" in given else GRU, found.node.target
        arguments = (given.pop("x"), w_nk, bias, *given.values(), read["reverse"])
        float_s, int8_s = medians(
            lambda: in_float(*arguments),  # type: ignore[operator]
            lambda: in_int8(values),
            rounds=_ROUNDS,
        )
        error = sqnr(result, in_int8(values)[0])
        self.measured[found.node] = SiteMeasurement(error, float_s, int8_s)

    def _run_groups(self, found: GroupedConvolution, entry: Entry, result: Tensor) -> None:
        assert entry.scheme is not None
        node: Any = found.site.node
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        x, alone = (
            self.env[found.site.x],
            grouped_form(found, entry.scheme, {**self.env, node: result}),
        )
        in_int8 = alone.forward
        float_s, int8_s = medians(
            lambda: node.target(*args, **kwargs), lambda: in_int8(x), rounds=_ROUNDS
        )
        self.measured[found.node] = SiteMeasurement(sqnr(result, in_int8(x)), float_s, int8_s)

    def _constant(self, node: fx.Node) -> Tensor:
        if self.constants[node] is None:  # it stands later in the graph
            self.constants[node] = attribute(node)
        return self.constants[node]  # type: ignore[return-value]


def _sizes(entry: Entry) -> int:
    match = entry.match
    return math.prod(hint(size) or 0 for size in (match.batch or 1, match.m, match.k, match.n))


def _constants(site: Site) -> tuple[fx.Node | None, ...]:
    return site.weight, site.bias, *(site.norm.constants if site.norm else ())


def int8_form(
    entry: Entry, site: Site, x: Tensor, w: Tensor, bias: Tensor | None
) -> fx.GraphModule:
    """Returns a graph of the single input x that computes one matmul in int8 with the constants `w`
    and `bias`, as a rewritten graph does. `entry`: the decision on the matmul `site`."""
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
    alone = replace(site, node=matmul, end=None, x=source, weight=weight, bias=b, trains=False)
    gm = fx.GraphModule(holder, graph)
    run_passes(gm, Context(Config()), plan=Plan((replace(entry, match=alone),)))
    return gm
