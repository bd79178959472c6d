"""Writes docs/tour.md: one linear followed through all stages, with what each of them prints.

python docs/make_tour.py           # rewrites docs/tour.md
python docs/make_tour.py --check   # fails if it would change
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, fx, nn

import qfx
from qfx.cost.device_models import costs_from
from qfx.cost.model import Costs, Estimate, Work
from qfx.dynamo_backend import backend as dynamo_backend
from qfx.match.base import of_kind
from qfx.match.matching import match
from qfx.match.site import Site
from qfx.ops import REFERENCES
from qfx.plan.policy import decide
from qfx.weights.graph_inputs import GraphInputs, PackedPart

TOUR = Path(__file__).with_name("tour.md")
TEMPLATE = Path(__file__).with_name("tour.template.md")
CONFIG = qfx.Config(minimum_gain=0)


class Model(nn.Module):
    """Two projections of one input, their product, and a layer with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 32), nn.Linear(64, 32, bias=False)
        self.up = nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(self.q(x) * self.k(x)))


def calls(gm: fx.GraphModule) -> str:
    """The graph as assignments."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name} = input")
        elif node.op == "call_function":
            name = getattr(node.target, "_opname", None) or node.target.__name__
            lines.append(f"{node.name} = {name}({', '.join(map(str, node.args))})")
        elif node.op == "output":
            lines.append(f"return {node.args[0]}")
    return "\n".join(lines)


def sites(gm: fx.GraphModule) -> str:
    rows = [
        (m.path, m.node, m.x, m.weight, m.bias, m.activation, f"{m.m}x{m.k}x{m.n}")
        for m in of_kind(match(gm), Site)
    ]
    return tabulate(rows, ("module", "node", "x", "weight", "bias", "activation", "MxKxN"))


class Slower:
    """Costs of a machine on which int8 takes 1.25 times as long as float."""

    def lacks(self, kind: str, dtype: torch.dtype, scheme: qfx.Scheme | None) -> str | None:
        return None

    def estimate(self, work: Work) -> Estimate:
        return Estimate(4e-6, 5e-6)

    def packing(self, work: Work) -> float:
        return 0.0

    def training(self, work: Work) -> float:
        return 0.0


def refused() -> str:
    """The plan of a model with a weight that is computed, where int8 does not gain."""

    class Refused(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x) + F.linear(x, x.mean() * self.k.weight)

    gm = qfx.trace(Refused(), torch.randn(6, 64))
    plan = decide(match(gm), qfx.Config(skip=["k"]), Slower())
    return str(plan)


def compiled() -> dict[str, str]:
    """What `torch.compile` hands over, the rewritten graph, and where its inputs come from."""
    handed: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
        handed.append(gm)
        return dynamo_backend.qfx(gm, examples, options={"minimum_gain": 0, "inner": "eager"})

    wraps = dynamo_backend.with_packed_weights
    patched = mock.patch.object(dynamo_backend, "with_packed_weights", wraps=wraps)
    with patched as wrapper, torch.no_grad():
        torch.compile(Model(), backend=backend)(torch.randn(6, 64))
    (forward, graph_inputs, _), _ = wrapper.call_args
    inputs = [n.name for n in handed[0].graph.find_nodes(op="placeholder")]
    rewritten = forward.__self__
    names = [n.name for n in rewritten.graph.find_nodes(op="placeholder")]
    origins = [origin(graph_inputs, place, inputs) for place in graph_inputs.inputs]
    return {
        "dynamo": calls(handed[0]),
        "inductor": calls(rewritten),
        "graph_inputs": tabulate(zip(names, origins, strict=True), ("input", "comes from")),
    }


def origin(graph_inputs: GraphInputs, place: int | PackedPart, inputs: Sequence[str]) -> str:
    if isinstance(place, int):
        return inputs[place]
    source = graph_inputs.sources[place.source]
    return f"{source.packing.parts[place.part]} of {inputs[source.argument]}, {source.packing}"


def arithmetic() -> dict[str, str]:
    """The operators on two tokens of four features and two outputs."""
    x = torch.tensor([[0.6, -1.0, 2.0, 0.25], [0.0, 3.0, 1.0, 5.0]])
    w = torch.tensor([[0.9, -0.5, 0.25, 2.0], [0.1, 0.15, -0.3, 0.4]])
    q, scale, zero_point = REFERENCES["quantize"](x, [8, 0, 0, 0, 0])
    w_q, w_scale, _ = REFERENCES["quantize"](w, [8, 1, 0, 0, 0])
    packed = REFERENCES["pack_weight"](w_q, w_scale)
    acc = REFERENCES["int8_mm"](q, zero_point, packed, 2)
    y = REFERENCES["dequantize"](acc, scale, None, w_scale.reshape(-1), None, "none", torch.float32)
    z, s, sw = int(zero_point[0]), float(scale[0]), float(w_scale[0])
    pairs = torch.stack([q[0], w_q[0]], 1).tolist()
    products = " + ".join(f"({a} + {-z})*{b}" for a, b in pairs)
    return {
        "x": f"x = {rounded(x)}\nw = {rounded(w)}",
        "quantized": f"q          = {q.tolist()}\nscale      = {rounded(scale.flatten())}\n"
        f"zero_point = {zero_point.flatten().tolist()}",
        "scale0": f"2/255 - (-1)/255 = {s:.5f}",
        "zero0": f"-128 - round(-1 / {s:.5f}) = {z}",
        "code0": f"round(0.6 / {s:.5f}) + ({z}) = {int(q[0, 0])}",
        "weight": f"w_q     = {w_q.tolist()}\nw_scale = {rounded(w_scale.flatten())}",
        "acc": f"acc = {acc.tolist()}\nacc[0][0] = {products} = {acc[0, 0]}",
        "result": f"y[0][0] = {acc[0, 0]} * ({s:.5f} * {sw:.5f}) = {y[0, 0]:.4f}\n"
        f"int8  y = {rounded(y)}\nfloat y = {rounded(x @ w.t())}",
        "bytes": str(packed.numel()),
        "layout": f"  0 header  {packed[:32].numpy().tobytes().hex(' ')} ...\n"
        f"128 scale   {rounded(packed[128:256].view(torch.float32)[:4])} ...\n"
        f"256 sums    {packed[256:384].view(torch.int32)[:4].tolist()} ...\n"
        f"384 codes   {packed[384:396].tolist()} ...",
    }


def rounded(t: Tensor) -> list[Any]:
    return [rounded(row) if row.ndim else round(row.item(), 4) for row in t]


def tour() -> str:
    with costs_from(Costs()):  # what differs between machines is left out
        return _tour()


def _tour() -> str:
    torch.manual_seed(0)
    gm = qfx.trace(Model(), torch.randn(6, 64))
    canonical, plan = qfx.rewrite(gm, CONFIG, canonical=True)
    fused, _ = qfx.rewrite(gm, CONFIG)
    blocks = {
        "captured": calls(gm),
        "sites": sites(gm),
        "plan": str(decide(match(gm), CONFIG, None)),
        "canonical": calls(canonical),
        "fused": calls(fused),
        "refused": refused(),
        **compiled(),
        **arithmetic(),
    }
    assert plan.quantized == 3
    text = TEMPLATE.read_text()
    for name, block in blocks.items():
        text = text.replace(f"@{name}@", block)
    return text


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(None if TOUR.read_text() == tour() else "docs/tour.md is out of date")
    TOUR.write_text(tour())
