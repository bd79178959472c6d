"""A linear with a quantized weight that does not train, under any scheme, with gradients for its
input and its bias. Equation (T1).

`qfx.ops.lowering` chooses the operators. Without gradients, the whole linear is one operator if
there is one for the scheme. The output has the same bits with and without gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

import qfx.weights.frozen_gradient  # noqa: F401  (registers an operator)
from qfx.host.autograd import below_autograd, in_forward_mode
from qfx.host.tensors import has_values
from qfx.nn.dtypes import output_dtype
from qfx.nn.functional import first_order, shifted
from qfx.ops.forms import Form, form_of, of_scheme, ste_code
from qfx.ops.layout import layout_of
from qfx.ops.lowering import Circumstance, LoweringStep, lower
from qfx.ops.packing import Packing
from qfx.ops.storage import Values, packed_values, values_of
from qfx.ops.weight_values import weight_values
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.cache import pack

ops = torch.ops.qfx
torch.fx.wrap("output_dtype")  # needed in every module that calls it


class Frozen(NamedTuple):
    """The tensors of a `qfx.nn.Linear`: the packed weight, and the tensors that define how its
    input is quantized. `shift` float32 [K] is added to the input. `factor` float32 [K] multiplies
    the input. `x_scale` and `x_zero_point` [1] are static. A tensor that the linear does not need
    is None."""

    packed: Tensor
    factor: Tensor | None = None
    x_scale: Tensor | None = None
    x_zero_point: Tensor | None = None
    shift: Tensor | None = None


def each(function: Callable[[Tensor], Tensor], frozen: Frozen) -> Frozen:
    """Returns `frozen` with `function` applied to each tensor that is not None."""
    beside = [None if t is None else function(t) for t in frozen[1:]]
    return Frozen(function(frozen.packed), *beside)


def freeze(
    weight: Tensor, how: Scheme | SiteRecipe, channels: int | None = None
) -> tuple[Scheme, Frozen]:
    """Quantizes and packs the float weight [N, K]. Returns the scheme, without a rotation if K
    has none, and the tensors of the quantized weight. `channels`: of a pixel, if rows of x are
    windows of pixels. Equation (R1)."""
    site = how if isinstance(how, SiteRecipe) else None
    scheme = _checked(weight, how).at(weight.shape[1], channels)
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
    """The values that all calls of linears with the same scheme and number of outputs share. They
    are computed once, so that eager calls of small linears spend no time on them."""

    scheme: Scheme
    form: Form
    given: dict[str, Any]  # arguments of the form's operators, by name
    # keys: whether K is transformed, gradients are recorded, and the weight is on a GPU
    steps: dict[tuple[bool, bool, bool], tuple[LoweringStep, ...]]


@cache
def prepared(scheme: Scheme, n: int) -> Prepared:
    """Returns the values that all calls with this scheme and a weight with `n` rows share; the same
    object for the same arguments."""
    rotation = scheme.rotation
    given = {**of_scheme(scheme, n, rotation), "activation": "none", "rotation": rotation}
    if scheme.x is not None:
        given["ste_code"] = ste_code(scheme, rotation)
    steps = {}
    for turned, trains, on_cuda in itertools.product((False, True), repeat=3):
        lowered = lower(scheme, Circumstance(turned, trains, on_cuda=on_cuda))
        steps[turned, trains, on_cuda] = (*lowered.shared, *lowered.own)
    return Prepared(scheme, form_of(scheme), given, steps)


def linear(x: Tensor, bias: Tensor | None, frozen: Frozen, how: Prepared) -> Tensor:
    """Maps x [..., K] to [..., N], in the dtype of x or of autocast. `how`: the result of
    `prepared` for the scheme that `freeze` returned."""
    x = shifted(x, frozen.shift)
    trains = torch.is_grad_enabled() and _requires_grad(x, bias)
    turned = frozen.factor is not None or how.scheme.rotation != 0
    steps, values = how.steps[turned, trains, frozen.packed.is_cuda], _values(x, bias, frozen, how)
    if not trains:
        return _without_gradient(steps, values)
    if how.form.gradient:
        return run(steps, values | _of_training(x, how.scheme))["y"]  # type: ignore[no-any-return]
    *before, _ = steps  # the product has no gradient of its own
    values = run(before, values)
    with torch.no_grad():
        y = how.form.fused(values)
    return carried(y, values["x"], bias, frozen.packed, how)


def _without_gradient(steps: Sequence[LoweringStep], values: dict[str, Any]) -> Tensor:
    """Runs the steps and returns y, without the autograd kernels of the operators. These kernels
    are Python functions that take as long as the sums of a small linear, and there is nothing to
    record."""
    if torch.compiler.is_compiling() or in_forward_mode():
        return run(steps, values)["y"]  # type: ignore[no-any-return]
    with below_autograd():
        return run(steps, values)["y"]  # type: ignore[no-any-return]


def _requires_grad(x: Tensor, bias: Tensor | None) -> bool:
    if isinstance(x, fx.Proxy):  # of a symbolic trace, which records no gradients
        return False
    return x.requires_grad or (bias is not None and bias.requires_grad)


def _values(x: Tensor, bias: Tensor | None, frozen: Frozen, how: Prepared) -> dict[str, Any]:
    """Returns the arguments of the steps, by name."""
    return {
        **how.given,
        "x": x,
        "bias": bias,
        "out_dtype": output_dtype(x),
        "weight": frozen.packed,
        "factor": frozen.factor,
        "static_scale": frozen.x_scale,
        "static_zero_point": frozen.x_zero_point,
    }


def _of_training(x: Tensor, scheme: Scheme) -> dict[str, Any]:
    """Returns the additional arguments of the steps if gradients are recorded, by name."""
    seed = None
    if scheme.backward == "int8":
        seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=x.device)
    return {"x": x.detach(), "carrier": x, "w": None, "gradient_seed": seed}


def run(steps: Sequence[LoweringStep], values: dict[str, Any]) -> dict[str, Any]:
    """Runs the steps and returns `values` with their results added."""
    for step in steps:
        found = step.run(values)
        one = len(step.gives) == 1
        values.update({step.gives[0]: found} if one else zip(step.gives, found, strict=True))
    return values


def carried(y: Tensor, x: Tensor, bias: Tensor | None, packed: Tensor, how: Prepared) -> Tensor:
    """Returns `y`, which was computed without recording gradients, with the gradients of x @ w^.T +
    bias. Equation (T1)."""
    return _FrozenLinearFunction.apply(x, bias, how, packed, y)  # type: ignore[no-any-return]


class _FrozenLinearFunction(torch.autograd.Function):
    """The autograd function of `carried`: returns `y`, and defines its gradients for the
    transformed x and for the bias."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, how: Prepared, packed: Tensor, y: Tensor) -> Tensor:
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, bias, ctx.how, packed, _ = inputs
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
        return dx.to(ctx.dtype), db, None, None, None


def float_weight(frozen: Frozen, scheme: Scheme, n: int, k: int) -> Tensor:
    """Dequantizes a weight: returns the float32 matrix [N, K] that multiplies x before its
    transform, factor * (R^T w^). Equation (R1)."""
    layout = layout_of(scheme.w, scheme.group, n)
    w_hat = weight_values(frozen.packed, layout, k, torch.float32)
    if frozen.factor is None and not scheme.rotation:
        return w_hat
    return ops.rotate(w_hat, frozen.factor, scheme.rotation, True)  # type: ignore[no-any-return]


def moved(frozen: Frozen, scheme: Scheme, n: int, k: int, device: torch.device) -> Frozen:
    """Returns the same weight [N, K] on another kind of device, packed in the layout of that
    device. A weight that is moved from the meta device is zero, because there are no values to
    move."""
    values = values_of(frozen.packed, scheme.w, scheme.group, n, k)
    packed = packed_values(Values(*[_moved(t, device) for t in values]), scheme.w, scheme.group)
    return Frozen(packed, *[_moved(t, device) for t in frozen[1:]])


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    if tensor is None or has_values(tensor):
        return None if tensor is None else tensor.to(device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def cut(
    frozen: Frozen,
    scheme: Scheme,
    shape: Sequence[int],
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> Frozen | None:
    """Cuts the rows and columns (begin, end) out of a weight of this shape [N, K]. Returns None if
    the columns are cut within a group or within a rotated block."""
    n, k = shape
    units = [unit for unit in (scheme.group, scheme.rotation) if unit]
    if any(at % unit for unit in units for at in columns if at != k):
        return None
    packed, layout = frozen.packed, layout_of(scheme.w, scheme.group, n)
    if rows != (0, n):
        packed = ops.cut_weight(packed, layout, k, 0, *rows, scheme.rotation)
        layout = layout_of(scheme.w, scheme.group, rows[1] - rows[0])
    if columns != (0, k):
        packed = ops.cut_weight(packed, layout, k, 1, *columns, scheme.rotation)
    packed = packed.clone() if packed is frozen.packed else packed
    of_k = [t if t is None else t[slice(*columns)].clone() for t in (frozen.factor, frozen.shift)]
    return frozen._replace(packed=packed, factor=of_k[0], shift=of_k[1])
