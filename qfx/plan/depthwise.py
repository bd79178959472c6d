"""Decision on a depthwise convolution: by the measured times of its pixels and taps."""

from __future__ import annotations

from dataclasses import replace

import torch

from qfx.cost.model import Costs, Work
from qfx.graph.capture import value
from qfx.host.shapes import hint
from qfx.match.grouped import GroupedConvolution
from qfx.ops.depthwise import QUAD, stored_taps
from qfx.ops.forms import DEPTHWISE
from qfx.plan.plan import Entry
from qfx.values.config import Config
from qfx.values.limits import why_few_features
from qfx.values.scheme import PER_ROW, PER_TENSOR, Scheme


def decide_depthwise(match: GroupedConvolution, config: Config, costs: Costs) -> Entry:
    """Returns the decision. Each channel of an image is quantized as a row, without rotation."""
    scheme = replace(config.chosen, rotation=0)
    if why_not := why_float(match, scheme) or why_few_features(match.k):
        return Entry(match, None, why_not)
    if config.minimum_gain == 0:
        return Entry(match, scheme, "int8 whatever it gains: minimum_gain=0")
    cost, work = costs.of(match, "int8", scheme), work_of(match, scheme)
    if cost is None or isinstance(cost, str) or work is None:
        return Entry(match, scheme, "int8; its gain was not predicted")
    estimate = cost.estimate(work)
    if estimate.gain < config.minimum_gain:
        reason = f"int8 would be {estimate.text}, below minimum_gain={config.minimum_gain}"
        return Entry(match, None, f"a depthwise convolution: {reason}", estimate)
    return Entry(match, scheme, f"int8 predicted {estimate.text}", estimate)


def why_float(match: GroupedConvolution, scheme: Scheme) -> str | None:
    """Returns why a depthwise convolution cannot be int8 with this scheme, or None if it can."""
    if match.trains:
        return "a depthwise convolution, which has no gradient in int8"
    if lacking := DEPTHWISE.lacking(match.device):
        return f"a depthwise convolution: {lacking}"
    x, w = scheme.x, scheme.w
    served = x is not None and x.axes == PER_ROW and not x.static and not x.group
    if not served or w.axes not in (PER_ROW, PER_TENSOR) or scheme.group or not w.symmetric:
        return f"a depthwise convolution, which {scheme} does not serve"
    return None


def work_of(match: GroupedConvolution, scheme: Scheme) -> Work | None:
    """Returns the work whose time is predicted, or None if the sizes are not known."""
    m, inputs = hint(match.m), getattr(value(match.site.x), "shape", None)
    pixels = None if inputs is None else [hint(n) for n in (inputs[0], *inputs[2:])]
    if m is None or pixels is None or None in pixels:
        return None
    kernel = match.windows[0]
    lines = kernel[0] if len(kernel) > 1 else 1
    quads = lines * stored_taps(kernel[-1]) // QUAD
    count = int(torch.Size(pixels).numel())  # type: ignore[arg-type]
    work = Work.linear(max(m, 1), match.k, match.n, match.float_type, scheme)
    return replace(work, quads=quads, pixels=count)
