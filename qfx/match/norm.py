"""Norm: a batch norm with constant statistics after a matmul, which multiplies and adds a constant
for each output, and so becomes part of the weight and the bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from qfx.graph.capture import is_constant
from qfx.graph.patterns import calls
from qfx.graph.views import View, apply

aten = torch.ops.aten
_CALLS = {
    F.batch_norm: ("x", "mean", "variance", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("x", "weight", "bias", "mean", "variance", "training", "momentum", "eps"),
    aten.batch_norm.default: (
        "x", "weight", "bias", "mean", "variance", "training", "momentum", "eps",
    ),
}  # fmt: skip
_SYNONYMS = {"input": "x", "running_mean": "mean", "running_var": "variance"}


@dataclass(frozen=True)
class Norm:
    """A batch norm in inference: y = (x - mean) / sqrt(variance + eps) * weight + bias, each a
    constant [N] or None. `node`: its call, which reads the result of the matmul."""

    node: fx.Node
    mean: fx.Node
    variance: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float

    @property
    def constants(self) -> tuple[fx.Node | None, ...]:
        """The constants in the order of the arguments of `folded`."""
        return self.mean, self.variance, self.weight, self.bias


def norm_of(node: fx.Node) -> Norm | None:
    """Returns the batch norm that the node calls, if its statistics are constants."""
    names = next((row for target, row in _CALLS.items() if calls(node, target)), None)
    if names is None:
        return None
    a = dict(zip(names, node.args, strict=False))
    a |= {_SYNONYMS.get(name, name): given for name, given in node.kwargs.items()}
    constants = [a.get(name) for name in ("mean", "variance", "weight", "bias")]
    known = all(n is None or (isinstance(n, fx.Node) and is_constant(n)) for n in constants)
    training, eps = a.get("training", False), a.get("eps", 1e-5)
    if not known or None in constants[:2] or training or not isinstance(eps, float):
        return None
    mean, variance, weight, bias = constants
    return Norm(node, mean, variance, weight, bias, eps)  # type: ignore[arg-type]


def folded(
    w_nk: Any,
    bias: Any,
    eps: float,
    repeat: View,
    mean: Any,
    variance: Any,
    weight: Any,
    shift: Any,
) -> tuple[Any, Any]:
    """Returns the weight [N, K] and the bias [N] in float32 of a matmul that is followed by a batch
    norm: w a and (bias - mean) a + shift with a = weight / sqrt(variance + eps). (C4)

    `repeat`: the view of constants of channels to [N]. All are tensors, or proxies of a graph.
    """
    a = (variance.float() + eps).rsqrt()
    a = a if weight is None else a * weight.float()
    b = -mean.float() if bias is None else bias.float() - mean.float()
    b = b * a if shift is None else b * a + shift.float()
    a, b = (_repeated(v, repeat) for v in (a, b))
    return w_nk.float() * a.unsqueeze(1), b


def _repeated(v: Any, repeat: View) -> Tensor:
    return apply(repeat, v)
