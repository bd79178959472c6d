"""Drawing modules into a program: linears that users have changed, and batch norms, which change
their statistics in training mode."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.grammar import ACTIVATIONS, ELEMENTWISE, PRODUCTS, Op
from tests.fuzz.held import (
    BREAKS,
    HELD,
    PUT_ON,
    SPECTRAL_NORM,
    WEIGHT_NORM,
    Holding,
    PutOn,
    lengths,
    part,
)
from tests.lib import bounds
from tests.lib.bounds import U32, Known

if TYPE_CHECKING:
    from tests.fuzz.draft import Draft

Meaning = tuple[str, Op, dict[str, str], str | None]  # name, operation, operands, result
BATCH_NORMS = 0.15  # of the modules
TWINS = 0.7  # of the linears behind a break
EPS, MOMENTUM = 1e-2, 0.1
_ROWS = {**ELEMENTWISE, **ACTIVATIONS}


def add_held(d: Draft) -> bool:
    """Draws a module; False where the draft has no operand for it."""
    if d.rng.random() < BATCH_NORMS:
        return add_batch_norm(d)
    change, held = d.rng.choice(list(PUT_ON)), d.rng.choice([*HELD, BREAKS])
    x = d.pick_shared(lambda t: True)
    added = add_linear(d, x, change, held)
    if added and held == BREAKS and d.rng.random() < TWINS:
        add_linear(d, x, change, held, alike=d.holdings[-1])
    return added


# --- linears ---


def add_linear(
    d: Draft, x: str | None, change: str, held: str, alike: Holding | None = None
) -> bool:
    """`alike`: a linear whose compiled code this one may share, behind a graph break."""
    how = PUT_ON[change]
    if x is None or (how.weight and d.real[x].dtype != torch.float32):
        return False
    if how.weight is SPECTRAL_NORM and d.training:
        return False  # it iterates at every call
    name, k, dtype = f"s{len(d.holdings)}", d.real[x].shape[-1], d.real[x].dtype
    n, bias = d.size(), d.rng.random() < 0.7
    if alike is not None:
        twin: Any = alike.make()
        n, bias = twin.out_features, twin.bias is not None
    made = dict(zip(how.parts, _weights(d, how, n, k), strict=True))
    if bias:
        made["bias"] = d.normal((n,)) * 0.5
    tensors = {f"{name}_{'wabc'[i]}": path for i, path in enumerate(made)}
    state = {
        tensor: ("buffer" if "._" in path else "parameter", made[path].to(dtype))
        for tensor, path in tensors.items()
    }
    make = functools.partial(_changed, change, k, n, bias, dtype)
    holding = Holding(name, held, f"Linear {n}x{k} bias={bias}", change, make, tensors)
    meanings = _meanings(d, change, x, [f"self.{tensor}" for tensor in tensors], bias)
    return d.hold(holding, state, meanings, HELD[held].call.format(m=name, x=x), x)


def _changed(change: str, k: int, n: int, bias: bool, dtype: torch.dtype) -> nn.Module:
    linear = nn.Linear(k, n, bias, dtype=dtype)
    PUT_ON[change].apply(linear)
    return linear


def _weights(d: Draft, how: PutOn, n: int, k: int) -> list[Tensor]:
    v = d.normal((n, k)) * k**-0.5
    if how.weight is WEIGHT_NORM:
        return [lengths(v) * (0.5 + torch.rand(n, 1, generator=d.generator)), v]
    if how.weight is not SPECTRAL_NORM:
        return [v]
    left, right = d.normal((n,)), d.normal((k,))
    for _ in range(20):
        left = F.normalize(v @ right, dim=0)
        right = F.normalize(v.T @ left, dim=0)
    return [v, left, right]


def _meanings(d: Draft, change: str, x: str, tensors: list[str], bias: bool) -> list[Meaning]:
    """What is before, the weight, the linear, what is after."""
    how, i = PUT_ON[change], len(d.steps)
    steps: list[Meaning] = []
    if how.before:
        steps.append((how.before, _ROWS[how.before], {"x": x}, x := f"h{i}"))
    w = tensors[0]
    if how.weight:
        operands = dict(zip(how.weight.operands, tensors, strict=False))
        steps.append((change, how.weight, operands, w := f"w{i}"))
    operands = {"x": x, "w": w, **({"b": tensors[-1]} if bias else {})}
    row = "linear_bias" if bias else "linear"
    steps.append((row, PRODUCTS[row], operands, f"v{i}"))
    if how.after:
        steps.append((how.after, _ROWS[how.after], {"x": f"v{i}"}, f"v{i}"))
    return steps


# --- batch norms: by the statistics of the batch in training mode, by kept ones otherwise ---


def _columns(x: Known) -> Known:
    return Known(x.v.mT, x.e.mT)


def _of_batch(u: float, x: Known, w: Known, b: Known) -> Tensor:
    rows = (Known(t.v[:, None], t.e[:, None]) for t in (w, b))
    return bounds.norm(True, EPS)(u, _columns(x), *rows).mT


def _of_kept(u: float, x: Known, mean: Known, var: Known, w: Known, b: Known) -> Tensor:
    """x (w r) + (b - mean w r) with r = (var + eps)^-1/2, in any order; statistics are exact."""
    scale = w.v.abs() * (var.v + EPS).rsqrt()
    sizes = scale * (x.most + mean.v.abs()) + b.v.abs()
    return bounds.rounded(u, sizes, scale * x.e + 8 * U32 * sizes)


def _running(kept: Known, new: Tensor, error: Tensor) -> Tensor:
    sizes = kept.most + new.abs() + error
    return (1 - MOMENTUM) * kept.e + MOMENTUM * error + 4 * U32 * sizes


def _running_mean(u: float, kept: Known, x: Known) -> Tensor:
    return _running(kept, x.v.mean(0), bounds.mean(U32, _columns(x)).squeeze(1))


def _running_var(u: float, kept: Known, x: Known) -> Tensor:
    """Of the mean of c^2, where c may be off by d."""
    n = x.v.shape[0]
    d = x.e + x.e.mean(0) + 2 * (n + 8) * U32 * x.most.amax(0)
    c = (x.v - x.v.mean(0)).abs()
    error = (2 * c * d + d * d).sum(0) / (n - 1) + (n + 8) * U32 * x.v.var(0)
    return _running(kept, x.v.var(0), error)


_KEPT = f"{{m}}.mul_({1 - MOMENTUM}).add_({{x}}.{{what}}(0), alpha={MOMENTUM})"
OF_BATCH = part(
    f"{{out}} = F.batch_norm({{x}}, None, None, {{w}}, {{b}}, True, 0.0, {EPS})", _of_batch
)
OF_KEPT = part(
    f"{{out}} = F.batch_norm({{x}}, {{m}}, {{v}}, {{w}}, {{b}}, False, 0.0, {EPS})", _of_kept
)
RUNNING_MEAN = part(_KEPT.replace("{what}", "mean"), _running_mean, writes=True)
RUNNING_VAR = part(_KEPT.replace("{what}", "var"), _running_var, writes=True)


def add_batch_norm(d: Draft) -> bool:
    x = d.pick(lambda t: t.ndim == 2 and t.shape[0] > 1 and t.dtype == torch.float32)
    if x is None:
        return False
    size, name, i = d.real[x].shape[1], f"n{len(d.holdings)}", len(d.steps)
    tensors = {
        f"{name}_m": "running_mean", f"{name}_v": "running_var",
        f"{name}_w": "weight", f"{name}_b": "bias",
    }  # fmt: skip
    drawn = [d.normal((size,)) for _ in tensors]
    values = (drawn[0] * 0.1, drawn[1].square() + 0.5, drawn[2] + 1, drawn[3])
    kinds = ("buffer", "buffer", "parameter", "parameter")
    state = dict(zip(tensors, zip(kinds, values, strict=True), strict=True))
    m, v, w, b = (f"self.{tensor}" for tensor in tensors)
    if d.training:
        steps: list[Meaning] = [
            ("batch_norm", OF_BATCH, {"x": x, "w": w, "b": b}, f"v{i}"),
            ("state", RUNNING_MEAN, {"m": m, "x": x}, None),
            ("state", RUNNING_VAR, {"m": v, "x": x}, None),
        ]
    else:
        operands = {"x": x, "m": m, "v": v, "w": w, "b": b}
        steps = [("batch_norm", OF_KEPT, operands, f"v{i}")]
    make = functools.partial(nn.BatchNorm1d, size, eps=EPS, momentum=MOMENTUM)
    holding = Holding(name, "attribute", "BatchNorm1d", None, make, tensors)
    return d.hold(holding, state, steps, f"self.{name}({x})", x)
