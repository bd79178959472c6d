"""Functions: int8 linears with straight-through gradients, eager or compiled."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qfx.nn.dtypes import output_dtype
from qfx.ops.code import code_of
from qfx.ops.forms import ste_code
from qfx.ops.layout import layout_of
from qfx.ops.quantize import code_range
from qfx.ops.registry import WHY_FIRST_ORDER
from qfx.values.scheme import PER_TENSOR, QSpec, Scheme

ops = torch.ops.qfx
torch.fx.wrap("output_dtype")  # here too: where it is called
_DEFAULT = Scheme()  # Dynamo traces the use of one, not the making


def specs(scheme: Scheme, where: str) -> tuple[QSpec, QSpec]:
    """Of x and w. Raises ValueError for what has no gradient in a function or module."""
    if scheme.x is None or not scheme.fits_activations or scheme.rotation:
        raise ValueError(
            f"{where}: the scheme {scheme} is for graphs that qfx rewrites; here both operands "
            "have one scale for each row or for all, and no rotation"
        )
    return scheme.x, scheme.w


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scheme: Scheme | None = None
) -> Tensor:
    """x [..., K] @ weight [N, K].T + bias [N] in int8, scales chosen dynamically by `scheme`.

    Returns the type of x, or that of autocast where it is on, as `F.linear` does. Differentiable
    once, by autograd and by `torch.func.grad` and `vjp`: gradients (T1). Second derivatives, `vmap`
    and forward mode raise. Source of the formulas: docs/numerics.md.
    """
    return _LinearFunction.apply(x, weight, bias, scheme or _DEFAULT)[0]  # type: ignore[no-any-return]


class _LinearFunction(torch.autograd.Function):
    """As linear_ste, in the form that function transforms need: what is saved is returned."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, scheme: Scheme) -> Any:
        spec, _ = specs(scheme, "qfx.nn.functional.linear")
        codes = ops.quantize(x, code_of(spec))
        w_q, w_scale, _ = ops.quantize(weight.detach(), code_of(scheme.w))
        layout = layout_of(scheme.w, 0, weight.shape[0])
        end = (layout, bias, "none", output_dtype(x))
        return ops.linear(*codes, ops.pack_weight(w_q, w_scale), *end), *codes

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, scheme = inputs
        _, q, scale, zero_point = output
        ctx.mark_non_differentiable(q, scale, zero_point)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.scheme = scheme
        ctx.save_for_backward(x, weight, q, scale, zero_point)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, q, scale, zero_point = ctx.saved_tensors
        grad = first_order(grad, "linear", x, weight)
        spec = ctx.scheme.w
        rows = grad.reshape(math.prod(q.shape[:-1]), weight.shape[0])
        w_hat = ops.fake_quantize(weight.detach(), list(spec.axes), spec.bits, True, grad.dtype)
        x_hat = ops.dequantize(q, scale, zero_point, None, None, "none", grad.dtype)
        dx = (rows @ w_hat).reshape(x.shape).to(x.dtype)
        dw = (rows.t() @ x_hat.reshape(rows.shape[0], x.shape[-1])).to(weight.dtype)
        db = None if ctx.bias_dtype is None else rows.sum(0).to(ctx.bias_dtype)
        return dx, dw, db, None


def first_order(grad: Tensor, who: str, *operands: Tensor) -> Tensor:
    """`grad`, but an error for whoever differentiates it with respect to `operands`."""
    if torch.compiler.is_compiling():  # a compiled backward has no second derivative anyway
        return grad
    return _FirstOrder.apply(grad, who, *operands)  # type: ignore[no-any-return]


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, who: str, *operands: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.who = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(f"{ctx.who} has no second derivative: {WHY_FIRST_ORDER}")


def lsq_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_step: Tensor | None,
    w_step: Tensor,
    scheme: Scheme,
    seed: Tensor | None = None,
    packed: Tensor | None = None,
) -> Tensor:
    """x [..., K] @ weight [N, K].T + bias [N] in int8, with learned step sizes. (Q6) (T1) (T2)

    `x_step`: float32 [1], or None for scales chosen per call by `scheme.x`. `w_step`: float32 [1],
    or [N, 1], one per output feature. Both must be positive. `seed`, int64 [1]: the matmuls of the
    gradients run in int8 with stochastic rounding (T3). `packed`: `lsq_packed` of this weight and
    step, if it is known already. Source: Esser et al., Learned Step Size Quantization, 2020; the
    gradient's scale factor is `qfx.nn.functional.scaled_gradient`.
    """
    spec, w_spec = specs(scheme, "lsq_linear")
    step = None if x_step is None else x_step.detach()
    codes = ops.quantize(x.detach(), code_of(spec), step)
    if packed is None:
        packed = lsq_packed(weight, w_step, scheme)
    how = (layout_of(w_spec, 0, weight.shape[0]), ste_code(scheme, 0), seed, output_dtype(x))
    steps = (x_step, w_step)
    return ops.linear_ste(x, weight, bias, *steps, [*codes], packed, *how)  # type: ignore


def lsq_packed(weight: Tensor, w_step: Tensor, scheme: Scheme) -> Tensor:
    """The weight [N, K] as the kernels read it, for a given step. (Q6)"""
    q, scale, _ = ops.quantize(weight.detach(), code_of(scheme.w), w_step.detach())
    return ops.pack_weight(q, scale)  # type: ignore[no-any-return]


def scaled_gradient(step: Tensor, features: int, bits: int) -> Tensor:
    """`step`, whose gradient is multiplied by 1 / sqrt(features * qmax), as LSQ recommends.

    `features`: how many elements share the step: K for an activation, K or N K for a weight.
    """
    factor = 1 / math.sqrt(max(features, 1) * code_range(bits, True)[1])
    return step.detach() + (step - step.detach()) * factor


def shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    """x [..., K] + shift [K], in the type of x; x itself where there is no shift."""
    if shift is None:
        return x
    if x.shape[-1] != shift.shape[0]:
        raise ValueError(f"x has K={x.shape[-1]}, but the shift added to it has {shift.shape[0]}")
    return x + shift.to(x.dtype)


def best_step(v: Tensor, bits: int, symmetric: bool, axes: tuple[int, ...]) -> Tensor:
    """The step of least mean square error for v [rows, K], among 64 fractions of the largest one.

    One for each row, [rows, 1], or one, [1, 1], for `axes` = (0, 1). float32, positive.
    """
    rows = v.detach().float().reshape(-1, v.shape[-1])
    rows = rows.reshape(1, -1) if axes == PER_TENSOR else rows
    qmin, qmax = code_range(bits, symmetric)
    largest = rows.abs().amax(1, keepdim=True).clamp_min(1e-8) / qmax
    best, least = largest, torch.full_like(largest, torch.inf)
    for i in range(1, 65):
        step = largest * (i / 64)
        error = (
            ((rows / step).round().clamp(qmin, qmax) * step - rows).square().sum(1, keepdim=True)
        )
        best, least = torch.where(error < least, step, best), torch.minimum(error, least)
    return best
