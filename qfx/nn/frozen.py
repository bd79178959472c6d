"""The linear of a frozen int8 weight under any scheme, with gradients to its input and bias. (T1)

Where no gradient is recorded it is one operator if there is one for the scheme; where one is, it
has the same bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.host.autograd import below_autograd, in_forward_mode
from qfx.nn.dtypes import output_dtype
from qfx.nn.functional import first_order, shifted
from qfx.ops.forms import QUANTIZE, STE, Form, form_of, of_scheme, ste_code
from qfx.ops.layout import layout_of
from qfx.ops.packing import Packing
from qfx.ops.ste import weight_values
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.cache import pack

ops = torch.ops.qfx
torch.fx.wrap("output_dtype")  # here too: where it is called


class Frozen(NamedTuple):
    """A quantized weight, and the numbers that its input is quantized with: `qfx.nn.Linear`."""

    packed: Tensor
    factor: Tensor | None = None
    x_scale: Tensor | None = None
    x_zero_point: Tensor | None = None
    shift: Tensor | None = None


def freeze(weight: Tensor, how: Scheme | SiteRecipe) -> tuple[Scheme, Frozen]:
    """The weight [N, K] quantized and packed, and the scheme with the rotation in use. (R1)"""
    site = how if isinstance(how, SiteRecipe) else None
    scheme = _checked(weight, how).at(weight.shape[1])
    factor = site.factor if site else None
    rounding = site.rounding if site else None
    packing = Packing(scheme.w, factor, scheme.rotation, rounding=rounding, group=scheme.group)
    packed = pack(weight, (), packing)
    if factor is not None:
        packed = packed._replace(factor=_vector(factor, torch.float32, weight))
    x_scale = _vector(site and site.scale, torch.float32, weight)
    x_zero_point = _vector(site and site.zero_point, torch.int32, weight)
    return scheme, Frozen(packed.weight, packed.factor, x_scale, x_zero_point)


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


class Prepared(NamedTuple):
    """What a scheme gives to each call: made once, as eager calls of small linears take little."""

    scheme: Scheme
    form: Form
    given: dict[str, Any]  # arguments of the form's operators, by name


def prepared(scheme: Scheme, n: int) -> Prepared:
    """Of a weight of `n` rows."""
    given = of_scheme(scheme, n, scheme.rotation)
    return Prepared(scheme, form_of(scheme), {**given, "activation": "none"})


def linear(x: Tensor, bias: Tensor | None, frozen: Frozen, how: Prepared) -> Tensor:
    """x [..., K] -> [..., N], of the type of x or of autocast. `how`: of the scheme that `freeze`
    returned."""
    x = shifted(x, frozen.shift)
    if not (torch.is_grad_enabled() and _requires_grad(x, bias)):
        return _without_gradient(x, _values(x, bias, frozen, how), how)
    if how.form.gradient:
        return _trained(x, _values(x, bias, frozen, how), how)
    if frozen.factor is not None or how.scheme.rotation:
        x = ops.rotate(x, frozen.factor, how.scheme.rotation)
    return _Carried.apply(x, bias, how, *frozen)  # type: ignore[no-any-return]


def _without_gradient(x: Tensor, values: dict[str, Any], how: Prepared) -> Tensor:
    """Autograd's kernels of our operators are Python functions, which take as long as the sums of a
    small linear: they are left out where nothing is for them to do."""
    if torch.compiler.is_compiling() or in_forward_mode():
        return _run(x, values, how)
    with below_autograd():
        return _run(x, values, how)


def _requires_grad(x: Tensor, bias: Tensor | None) -> bool:
    return x.requires_grad or (bias is not None and bias.requires_grad)


def _values(x: Tensor, bias: Tensor | None, frozen: Frozen, how: Prepared) -> dict[str, Any]:
    """What the operators of the form are given, by the names of their arguments."""
    return {
        **how.given,
        "x": x,
        "bias": bias,
        "out_dtype": output_dtype(x),
        "weight": frozen.packed,
        "factor": frozen.factor,
        "scale": frozen.x_scale,
        "zero_point": frozen.x_zero_point,
    }


def _run(x: Tensor, values: dict[str, Any], how: Prepared) -> Tensor:
    """The fewest operators that there are for the scheme."""
    form = how.form
    dynamic = None if how.scheme.calibrated else form.dynamic
    if dynamic is not None and (dynamic.on_cuda or not values["weight"].is_cuda):
        return dynamic(values)  # type: ignore[no-any-return]
    if form.codes:
        q, scale, zero_point = QUANTIZE(values)
        values |= {"q": q, "scale": scale, "zero_point": zero_point}
    elif values["factor"] is not None or how.scheme.rotation:
        values["x"] = ops.rotate(x, values["factor"], how.scheme.rotation)
    return form.fused(values)  # type: ignore[no-any-return]


def _trained(x: Tensor, values: dict[str, Any], how: Prepared) -> Tensor:
    codes, seed = QUANTIZE({**values, "x": x.detach()}), None
    if how.scheme.backward == "int8":
        seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=x.device)
    steps = {"x_step": values["scale"], "w_step": None, "seed": seed}
    code = ste_code(how.scheme, how.scheme.rotation)
    given = {**values, **steps, "w": None, "codes": list(codes), "code": code}
    return STE(given)  # type: ignore[no-any-return]


class _Carried(torch.autograd.Function):
    """Of x', for the operator without a gradient of its own: float activations, int8 weights."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, how: Prepared, *frozen: Any) -> Tensor:
        return how.form.fused(_values(x, bias, Frozen(*frozen), how))  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, bias, ctx.how, packed, *_ = inputs
        ctx.save_for_backward(packed)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (packed,), layout = ctx.saved_tensors, ctx.how.given["layout"]
        grad = first_order(grad, "Linear", packed)
        g_mn = grad.reshape(math.prod(ctx.shape[:-1]), layout[0])
        w_hat = weight_values(packed, layout, ctx.shape[-1], grad.dtype)
        dx = (g_mn @ w_hat).reshape(ctx.shape)
        db = None if ctx.bias_dtype is None else g_mn.sum(0).to(ctx.bias_dtype)
        return dx.to(ctx.dtype), db, *([None] * 6)


def float_weight(frozen: Frozen, scheme: Scheme, n: int, k: int) -> Tensor:
    """float32 [N, K]: the weight that multiplies x itself, factor * (R^T w^). (R1)"""
    layout = layout_of(scheme.w, scheme.group, n)
    w_hat = weight_values(frozen.packed, layout, k, torch.float32)
    if frozen.factor is None and not scheme.rotation:
        return w_hat
    return ops.rotate(w_hat, frozen.factor, scheme.rotation, True)  # type: ignore[no-any-return]
