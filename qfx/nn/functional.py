"""Functional int8 linears with straight-through gradients, eager or compiled; and attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qfx.nn.attention import scaled_dot_product_attention as scaled_dot_product_attention
from qfx.nn.dtypes import output_dtype
from qfx.ops.code import code_of
from qfx.ops.forms import ste_code
from qfx.ops.layout import layout_of
from qfx.ops.quantize import code_range
from qfx.ops.registry import WHY_FIRST_ORDER
from qfx.values.scheme import PER_TENSOR, QSpec, Scheme

ops = torch.ops.qfx
torch.fx.wrap("output_dtype")  # needed in every module that calls it
_DEFAULT = Scheme()  # made here, because Dynamo can trace its use but not its construction


def specs(scheme: Scheme, where: str) -> tuple[QSpec, QSpec]:
    """Returns the QSpec of x and that of w. Raises ValueError if a function or module cannot
    compute gradients for the scheme."""
    if scheme.x is None or not scheme.fits_activations or scheme.rotation:
        raise ValueError(
            f"{where}: the scheme {scheme} is for graphs that qfx rewrites; here both operands "
            "have one scale for each row or for all, and no rotation"
        )
    return scheme.x, scheme.w


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scheme: Scheme | None = None
) -> Tensor:
    """Returns x [..., K] @ weight [N, K].T + bias [N] in int8. Both operands are quantized at each
    call, as `scheme` says.

    The result has the dtype of x, or that of autocast if it is on, as with `F.linear`.
    Differentiable once, by autograd and by `torch.func.grad` and `vjp`: gradients (T1). Second
    derivatives, `vmap` and forward mode raise errors. Raises ValueError for a scheme with rotation,
    groups, per-column or static scales, or float activations.

        y = qfx.nn.functional.linear(x, weight, bias)

    Source of the formulas: docs/numerics.md.
    """
    return _LinearFunction.apply(x, weight, bias, scheme or _DEFAULT)[0]  # type: ignore[no-any-return]


class _LinearFunction(torch.autograd.Function):
    """The autograd function of `linear`. It computes the same as the operator `linear_ste`, but
    returns the tensors that backward needs as outputs, which function transforms require."""

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


def first_order(grad: Tensor, who: str, *operands: Tensor, why: str = WHY_FIRST_ORDER) -> Tensor:
    """Returns `grad`, for backward functions that have no derivative of their own: differentiating
    the result with respect to `operands` raises an error that names `who` and says `why`."""
    if torch.compiler.is_compiling():  # a compiled backward has no second derivative anyway
        return grad
    return _FirstOrder.apply(grad, f"{who} has no second derivative: {why}", *operands)  # type: ignore[no-any-return]


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, text: str, *operands: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.text = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(ctx.text)


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
    """Returns x [..., K] @ weight [N, K].T + bias [N] in int8, with learned step sizes. (Q6) (T1)
    (T2)

    `x_step`: float32 [1], or None if `scheme.x` chooses scales at each call. `w_step`: float32 [1],
    or [N, 1], one for each output feature. Both must be positive. `seed`, int64 [1]: if given, the
    matmuls of the gradients run in int8 with stochastic rounding (T3). `packed`: the result of
    `lsq_packed` for this weight and step, if it is already known.

    Source: Esser et al., Learned Step Size Quantization, 2020; the gradient's scale factor is
    `qfx.nn.functional.scaled_gradient`.
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
    """Quantizes the weight [N, K] with the step `w_step` and packs the codes in the layout of the
    kernels. Equation (Q6)."""
    q, scale, _ = ops.quantize(weight.detach(), code_of(scheme.w), w_step.detach())
    return ops.pack_weight(q, scale)  # type: ignore[no-any-return]


def scaled_gradient(step: Tensor, features: int, bits: int) -> Tensor:
    """Returns `step` with its gradient multiplied by 1 / sqrt(features * qmax), as LSQ recommends.

    `features`: the number of elements that share the step: K for an activation, K or N K for a
    weight.
    """
    factor = 1 / math.sqrt(max(features, 1) * code_range(bits, True)[1])
    return step.detach() + (step - step.detach()) * factor


def shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    """Returns x [..., K] + shift [K], in the dtype of x; x itself if there is no shift. Raises
    ValueError if the sizes differ."""
    if shift is None:
        return x
    if x.shape[-1] != shift.shape[0]:
        raise ValueError(f"x has K={x.shape[-1]}, but the shift added to it has {shift.shape[0]}")
    return x + shift.to(x.dtype)


def best_step(v: Tensor, bits: int, symmetric: bool, axes: tuple[int, ...]) -> Tensor:
    """Returns the step with the least mean square error for v [rows, K], out of 64 fractions of the
    largest step. The result is float32 and positive: [rows, 1], one for each row, or [1, 1] if
    `axes` = (0, 1)."""
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
