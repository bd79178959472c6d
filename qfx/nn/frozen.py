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
from qfx.ops.forms import Form, form_of, of_scheme, quantizing
from qfx.ops.packing import Packing
from qfx.ops.single_tensors import Quantized, dequantize
from qfx.ops.storage import Values, storage_of
from qfx.values.scheme import QSpec, Scheme
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.cache import pack

ops = torch.ops.qfx
torch.fx.wrap("output_dtype")  # here too: where it is called


class Frozen(NamedTuple):
    """A quantized weight, and the numbers that its input is quantized with: `qfx.nn.Linear`."""

    packed: Tensor
    scale: Tensor | None = None
    zero_point: Tensor | None = None
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


class Prepared(NamedTuple):
    """What a scheme gives to each call: made once, as eager calls of small linears take little."""

    scheme: Scheme
    form: Form
    given: dict[str, Any]  # arguments of the form's operators, by name


def prepared(scheme: Scheme, n: int) -> Prepared:
    """Of a weight of `n` rows."""
    own = {"activation": "none", "rotation": scheme.rotation, "n": n}
    return Prepared(scheme, form_of(scheme), of_scheme(scheme) | own)


def linear(x: Tensor, bias: Tensor | None, frozen: Frozen, how: Prepared) -> Tensor:
    """x [..., K] -> [..., N], of the type of x or of autocast. `how`: of the scheme that `freeze`
    returned."""
    x = shifted(x, frozen.shift)
    if not (torch.is_grad_enabled() and _requires_grad(x, bias)):
        return _without_gradient(x, _values(x, bias, frozen, how), how)
    if how.form.trained is not None:
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
        "packed": frozen.packed,
        "w_scale": frozen.scale,
        "w_zero": frozen.zero_point,
        "factor": frozen.factor,
        "scale": frozen.x_scale,
        "zero_point": frozen.x_zero_point,
    }


def _run(x: Tensor, values: dict[str, Any], how: Prepared) -> Tensor:
    """The fewest operators that there are for the scheme."""
    form = how.form
    dynamic = None if how.scheme.calibrated else form.dynamic
    if dynamic is not None and (dynamic.on_cuda or not values["packed"].is_cuda):
        return dynamic(values)  # type: ignore[no-any-return]
    if form.codes:
        values |= _codes(values, how)
    elif values["factor"] is not None or values["rotation"]:
        values["x"] = ops.rotate(x, values["factor"], values["rotation"])
    return form.fused(values)  # type: ignore[no-any-return]


def _codes(values: dict[str, Any], how: Prepared) -> dict[str, Tensor]:
    assert how.scheme.x is not None
    q, scale, zero_point = quantizing(how.scheme.x)(values)
    return {"q": q, "scale": scale, "zero_point": zero_point}


def _trained(x: Tensor, values: dict[str, Any], how: Prepared) -> Tensor:
    call, seed = how.form.trained, None
    assert call is not None
    if how.scheme.backward == "int8":
        seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=x.device)
    carriers = {"w": None, "x_step": values["scale"], "w_step": None, "seed": seed}
    codes = _codes({**values, "x": x.detach()}, how)
    return call({**values, **codes, **carriers})  # type: ignore[no-any-return]


class _Carried(torch.autograd.Function):
    """Of x', for the operator without a gradient of its own: float activations, int8 weights."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, how: Prepared, *frozen: Any) -> Tensor:
        turned = {"factor": None, "rotation": 0}
        return _run(x, {**_values(x, bias, Frozen(*frozen), how), **turned}, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, bias, ctx.how, packed, scale, zero_point, *_ = inputs
        ctx.save_for_backward(packed, scale, zero_point)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        frozen, n = Frozen(*ctx.saved_tensors), ctx.how.given["n"]
        grad = first_order(grad, "Linear", frozen.packed)
        g_mn = grad.reshape(math.prod(ctx.shape[:-1]), n)
        w_hat = weight_values(values_of(frozen, ctx.how.scheme, n, ctx.shape[-1]), ctx.how.scheme)
        w_hat = w_hat.to(grad.dtype)
        dx = (g_mn @ w_hat).reshape(ctx.shape)
        db = None if ctx.bias_dtype is None else g_mn.sum(0).to(ctx.bias_dtype)
        return dx.to(ctx.dtype), db, *([None] * 8)


def values_of(frozen: Frozen, scheme: Scheme, n: int, k: int) -> Values:
    """What the packed weight says."""
    parts = {"blocks": frozen.packed, "scale": frozen.scale, "zero_point": frozen.zero_point}
    return storage_of(scheme.w, scheme.group).unpack(parts, scheme.w, n, k)


def with_values(frozen: Frozen, values: Values, scheme: Scheme) -> Frozen:
    """The same linear of another weight."""
    parts = storage_of(scheme.w, scheme.group).pack(values, scheme.w, scheme.group)
    scales = {"scale": parts.get("scale"), "zero_point": parts.get("zero_point")}
    return frozen._replace(packed=parts["blocks"], **scales)


def weight_values(values: Values, scheme: Scheme) -> Tensor:
    """w^ float32 [N, K], which multiplies the transformed x. (Q5) (Q14)"""
    codes, scale, zero_point, minimum = values
    rows = QSpec(group=scheme.w.group)
    if zero_point is None:
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    w_hat = dequantize(Quantized(codes, scale, zero_point, rows))
    if minimum is None:
        return w_hat
    return w_hat + minimum.repeat_interleave(scheme.w.group, 1)[:, : w_hat.shape[1]]


def float_weight(frozen: Frozen, scheme: Scheme, n: int, k: int) -> Tensor:
    """float32 [N, K]: the weight that multiplies x itself, factor * (R^T w^). (R1)"""
    w_hat = weight_values(values_of(frozen, scheme, n, k), scheme)
    if frozen.factor is None and not scheme.rotation:
        return w_hat
    return ops.rotate(w_hat, frozen.factor, scheme.rotation, True)  # type: ignore[no-any-return]
