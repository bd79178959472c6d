"""The linear of a frozen int8 weight under any scheme, with gradients to its input and bias. (T1)

Where no gradient is recorded it is one operator if there is one for the scheme; where one is, it
has the same bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.nn.dtypes import output_dtype
from qfx.nn.functional import first_order
from qfx.ops.packing import Packing
from qfx.ops.quantize import code_range
from qfx.ops.single_tensors import Quantized, dequantize
from qfx.values.recipe import SiteRecipe
from qfx.values.scheme import PER_TENSOR, QSpec, Scheme
from qfx.weights.cache import pack

ops = torch.ops.qfx
torch.fx.wrap("output_dtype")  # here too: where it is called


class Frozen(NamedTuple):
    """A quantized weight, and the numbers that its input is quantized with: `qfx.nn.Linear`."""

    packed: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    factor: Tensor | None = None
    x_scale: Tensor | None = None
    x_zero_point: Tensor | None = None


def freeze(weight: Tensor, how: Scheme | SiteRecipe) -> tuple[Scheme, Frozen]:
    """The weight [N, K] quantized and packed, and the scheme with the rotation in use. (R1)"""
    site = how if isinstance(how, SiteRecipe) else None
    scheme = _checked(weight, how).at(weight.shape[1])
    factor = site.factor if site else None
    packed = pack(weight, (), Packing(scheme.w, factor, scheme.rotation))
    if factor is not None:
        packed = packed._replace(factor=_vector(factor, torch.float32, weight))
    x_scale = _vector(site and site.scale, torch.float32, weight)
    x_zero_point = _vector(site and site.zero_point, torch.int32, weight)
    parts = (packed.blocks, packed.scale, packed.zero_point, packed.factor)
    return scheme, Frozen(*parts, x_scale, x_zero_point)


def _vector(value: Any, dtype: torch.dtype, like: Tensor) -> Tensor | None:
    return None if value is None else torch.tensor(value, dtype=dtype, device=like.device).ravel()


def _checked(weight: Tensor, how: Scheme | SiteRecipe) -> Scheme:
    if isinstance(how, Scheme):
        if how.calibrated:
            raise ValueError(f"Linear: {how} has static scales: give the SiteRecipe that has them")
        return how
    if how.scheme is None:
        raise ValueError(f"Linear: the recipe of {how} says that it stays float")
    n, k = weight.shape
    if (how.n, how.k) != (n, k):
        raise ValueError(
            f"Linear: the recipe of {how} is for N={how.n} K={how.k}, the weight has N={n} K={k}"
        )
    if how.outliers:
        raise ValueError(
            f"Linear: the recipe of {how} keeps {len(how.outliers)} features in float, which a "
            "module does not: give the recipe to torch.compile, or skip this one"
        )
    return how.scheme


def linear(x: Tensor, bias: Tensor | None, frozen: Frozen, scheme: Scheme) -> Tensor:
    """x [..., K] -> [..., N], of the type of x or of autocast. `scheme` as `freeze` returned it."""
    turned = frozen.factor is not None or scheme.rotation != 0
    transform = (frozen.factor, scheme.rotation) if turned else ()  # (R1)
    leaves = (x,) if bias is None else (x, bias)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in leaves)):
        return _run(x, bias, frozen, scheme, transform)
    if scheme.x is not None and not scheme.grouped:
        return _trained(x, bias, frozen, scheme, transform)
    x = ops.rotate(x, *transform) if transform else x
    return _Carried.apply(x, bias, scheme, *frozen)  # type: ignore[no-any-return]


def _run(
    x: Tensor, bias: Tensor | None, frozen: Frozen, scheme: Scheme, transform: tuple[Any, ...]
) -> Tensor:
    weight, end, spec = (frozen.packed, frozen.scale), (bias, "none", output_dtype(x)), scheme.x
    if spec is None:
        turned = ops.rotate(x, *transform) if transform else x
        return ops.int8_weight_linear(turned, *weight, *end)  # type: ignore[no-any-return]
    if scheme.grouped:
        codes = _codes(x, frozen, scheme, transform)
        return ops.int8_linear_groups(*codes, *weight, frozen.zero_point, *end)  # type: ignore
    if spec.static:
        return ops.int8_linear(*_codes(x, frozen, scheme, transform), *weight, *end)  # type: ignore
    how = (list(spec.axes), spec.bits, spec.symmetric)
    return ops.int8_linear_dynamic(x, *weight, bias, *how, *end[1:], *transform)  # type: ignore


def _codes(
    x: Tensor, frozen: Frozen, scheme: Scheme, transform: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    spec = scheme.x
    assert spec is not None
    how = (spec.bits, spec.symmetric, *transform)
    if not spec.static:
        return ops.quantize(x, list(spec.axes), *how)  # type: ignore[no-any-return]
    given = (frozen.x_scale, frozen.x_zero_point)
    return ops.quantize_static(x, *given, *how)  # type: ignore[no-any-return]


def _trained(
    x: Tensor, bias: Tensor | None, frozen: Frozen, scheme: Scheme, transform: tuple[Any, ...]
) -> Tensor:
    spec, seed = scheme.x, None
    assert spec is not None
    if scheme.backward == "int8":
        seed = torch.randint(0, 2**62, (1,), device=x.device)
    weight = (frozen.packed, frozen.scale)
    how = (list(PER_TENSOR), spec.bits, scheme.w.bits, spec.symmetric, seed, output_dtype(x))
    carriers = (x, None, bias, frozen.x_scale, None)
    codes = _codes(x.detach(), frozen, scheme, transform)
    return ops.int8_linear_ste(*carriers, *codes, *weight, *how, *transform)  # type: ignore


class _Carried(torch.autograd.Function):
    """Of x', for operators without a gradient of their own: weight-only, groups, zero points."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, scheme: Scheme, *frozen: Any) -> Tensor:
        return _run(x, bias, Frozen(*frozen), scheme, ())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, bias, ctx.scheme, *frozen = inputs
        kept = Frozen(*frozen)
        ctx.save_for_backward(x if kept.x_scale is not None else None, *kept[:3], *kept[4:])
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, packed, scale, zero_point, x_scale, x_zero_point = ctx.saved_tensors
        grad = first_order(grad, "Linear", scale)
        g_mn = grad.reshape(math.prod(ctx.shape[:-1]), scale.shape[0])
        codes = ops.unpack_weight(packed, scale.shape[0], ctx.shape[-1])
        w_hat = weight_values(codes, scale, zero_point, ctx.scheme, grad.dtype)
        dx = (g_mn @ w_hat).reshape(ctx.shape)
        if x_scale is not None:  # (T2)
            spec = ctx.scheme.x
            qmin, qmax = code_range(spec.bits, spec.symmetric)
            v = x / x_scale + (0 if x_zero_point is None else x_zero_point)
            dx = dx * ((v >= qmin) & (v <= qmax))
        db = None if ctx.bias_dtype is None else g_mn.sum(0).to(ctx.bias_dtype)
        return dx.to(ctx.dtype), db, *([None] * 7)


def weight_values(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme, dtype: torch.dtype
) -> Tensor:
    """w^ [N, K], which multiplies the transformed x. (Q5)"""
    rows = QSpec(group=scheme.w.group)
    if zero_point is None:
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    return dequantize(Quantized(codes, scale, zero_point, rows), dtype)
