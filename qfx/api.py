"""The graph-level API: quantize any FX graph without torch.compile."""

from __future__ import annotations

from torch import fx

from qfx.canonical import rewrite as to_canonical
from qfx.capture import clone
from qfx.config import Config
from qfx.dynamo import plan_of
from qfx.fuse import fuse
from qfx.plan import Plan
from qfx.provide import as_constants


def rewrite(
    gm: fx.GraphModule,
    config: Config | None = None,
    *,
    canonical: bool = False,
    training: bool = False,
) -> tuple[fx.GraphModule, Plan]:
    """A copy of `gm` with its matmuls in int8, and the plan that says what became of each.

    `gm`: from `qfx.trace`, `torch.export.export(...).module()` or any FX tool; it is not changed.
    Its weights are quantized and packed now, so later changes to them are not seen. Where the graph
    does not know its shapes (traced without example inputs) gains cannot be predicted and every
    legal site is quantized. `training` keeps the float weights as parameters, quantizes them at
    every call and gives them straight-through gradients. `canonical` keeps readable operators for
    each site (docs/tour.md). Raises ValueError for a pattern of `config` that matches nothing and
    for a recipe of another model.
    """
    copy = clone(gm)
    plan = plan_of(copy, config or Config(), training)
    to_canonical(copy, plan, as_constants(copy))
    if not canonical:
        fuse(copy)
    return clone(copy), plan  # the clone leaves behind what the graph no longer uses
