"""Products of experts with straight-through gradients: linear_experts_ste, whose weights train, and
the gradient of linear_experts, whose weights are frozen. See docs/numerics.md (X3).

Rows of an expert have the gradients of `linear_ste` with its weight. A loop over experts inside one
operator computes them, so that no more than one weight is dequantized, or packed, at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.layout import Layout
from qfx.ops.registry import fake, gradient, in_python, linear_fake, no_gradient
from qfx.ops.ste import SavedForBackward, input_gradient, weight_gradient

ops = torch.ops.qfx
_TRIPLE = ("q", "scale", "zero_point")
_FROZEN = (8, 0)  # what `code` says of a weight that is packed already


@in_python(
    "(Tensor x, Tensor? w, Tensor[] codes, Tensor? weight, SymInt[] layout, Tensor offsets, "
    "int[] code, Tensor? seed, ScalarType out_dtype) -> Tensor"
)
def linear_experts_ste(
    x: Tensor,
    w: Tensor | None,
    codes: Sequence[Tensor],
    weight: Tensor | None,
    layout: Sequence[int],
    offsets: Tensor,
    code: Sequence[int],
    seed: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes `linear_experts` of x [R, K], whose `codes` (q int8, scale, zero point, each with R
    rows) were computed before -> out_dtype [R, N]. (X3)

    Gradients go to x, which is not read, and to the weights w [E, N, K], which are quantized here.
    If w is None, the weights are frozen, and `weight` int8 [E, bytes] has them packed. `code` and
    `seed`: as of `linear_ste`.
    """
    if (w is None) == (weight is None):
        given = "neither" if w is None else "both"
        raise ValueError(f"linear_experts_ste: of w and weight it takes one, {given} is given")
    if w is not None and not Layout(*layout).one_scale:
        raise ValueError(
            f"linear_experts_ste: w is given, but the weight has the layout {list(layout)}; a "
            "weight that trains has 8 bits, one scale for each row and no zero points"
        )
    y = codes[0].new_zeros(codes[0].shape[0], layout[0], dtype=out_dtype)
    for e, rows in _rows_of(offsets, y.shape[0]):
        packed = _packed(w[e], code) if weight is None else weight[e]  # type: ignore[index]
        triple = (part[rows] for part in codes)
        y[rows] = ops.linear.default(*triple, packed, layout, None, "none", out_dtype)
    return y


linear_fake("linear_experts_ste")


def _rows_of(offsets: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Yields the experts that have rows, and their rows."""
    begin = 0
    for e, end in enumerate(offsets.tolist()):
        if not begin <= end <= rows:
            raise ValueError(
                f"the rows of expert {e} end at {end}, expected between {begin}, where they begin, "
                f"and {rows}"
            )
        if begin < end:
            yield e, slice(begin, end)
        begin = end


def _packed(w: Tensor, code: Sequence[int]) -> Tensor:
    """Quantizes and packs a weight [N, K] that trains."""
    *_, rotation, bits, per_tensor = code
    of_w = Code(bits, per_tensor=per_tensor, rotation=rotation)
    q, scale, _ = ops.quantize.default(w, list(of_w))
    return ops.pack_weight.default(q, scale)  # type: ignore[no-any-return]


class _OneExpert(NamedTuple):
    """The properties of the product of one expert that its gradients depend on: x is [rows, K]."""

    layout: Layout
    code: Code
    w_bits: int
    w_per_tensor: int
    shape: tuple[int, int]
    x_dtype: torch.dtype
    keeps_turned: bool = False


@in_python(
    "(Tensor grad, Tensor? w, Tensor[] codes, Tensor? weight, SymInt[] layout, Tensor offsets, "
    "int[] code, Tensor? seed, Tensor? factor, SymInt k, ScalarType dtype, bool[] wants) "
    "-> (Tensor, Tensor, Tensor)"
)
def linear_experts_backward(
    grad: Tensor,
    w: Tensor | None,
    codes: Sequence[Tensor],
    weight: Tensor | None,
    layout: Sequence[int],
    offsets: Tensor,
    code: Sequence[int],
    seed: Tensor | None,
    factor: Tensor | None,
    k: int,
    dtype: torch.dtype,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of a product of experts from that of y, [R, N]: of x [R, k] in
    `dtype`, of the weights [E, N, K] and of the biases [E, N]. (X3)

    `wants`: which of the three are computed; the others are empty. The codes of x are read for the
    gradients of w alone, and may be left out. The int8 backward of expert e has the seed `seed` +
    2 e.
    """
    dx, dw, db = _empty(grad, w, layout, offsets, k, dtype, wants)
    *five, w_bits, w_per_tensor = code
    hit = dict(_rows_of(offsets, grad.shape[0]))
    _clear(dx, dw, db, hit)
    for e, rows in hit.items():
        g, triple = grad[rows], dict(zip(_TRIPLE, (part[rows] for part in codes), strict=False))
        shape = (g.shape[0], k)
        how = _OneExpert(Layout(*layout), Code(*five), w_bits, w_per_tensor, shape, dtype)
        saved = SavedForBackward(
            w=None if w is None else w[e],
            weight=None if weight is None else weight[e],
            seed=None if seed is None else seed + 2 * e,
            factor=factor,
            **triple,
        )
        if wants[0]:
            dx[rows] = input_gradient(how, saved, g)[0]
        if wants[1]:
            dw[e] = weight_gradient(how, saved, g)[0]
        if wants[2]:
            db[e] = g.sum(0)
    return dx, dw, db


def _clear(dx: Tensor, dw: Tensor, db: Tensor, hit: Mapping[int, slice]) -> None:
    """Sets to 0 the gradients of experts without rows, and of rows after those of all experts."""
    dx[max((rows.stop for rows in hit.values()), default=0) :] = 0
    for of_experts in (dw, db):
        for e in range(len(of_experts)):
            if e not in hit:
                of_experts[e] = 0


def _empty(
    grad: Tensor,
    w: Tensor | None,
    layout: Sequence[int],
    offsets: Tensor,
    k: int,
    dtype: torch.dtype,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    want_x, want_w, want_bias = wants
    dx = grad.new_empty((grad.shape[0], k) if want_x else 0, dtype=dtype)
    dw = torch.empty_like(w) if want_w and w is not None else grad.new_empty(0)
    return dx, dw, grad.new_empty((offsets.shape[0], layout[0]) if want_bias else 0)


@fake("linear_experts_backward")
def _(
    grad: Tensor,
    w: Tensor | None,
    codes: Sequence[Tensor],
    weight: Tensor | None,
    layout: Sequence[int],
    offsets: Tensor,
    code: Sequence[int],
    seed: Tensor | None,
    factor: Tensor | None,
    k: int,
    dtype: torch.dtype,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(grad, w, layout, offsets, k, dtype, wants)


no_gradient("linear_experts_backward", "compute it in float")


def _setup_ste(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, codes, weight, layout, offsets, code, seed, _ = inputs
    ctx.layout, ctx.code, ctx.k, ctx.x_dtype = layout, code, x.shape[-1], x.dtype
    ctx.wants = [x.requires_grad, w is not None and w.requires_grad, False]
    kept = codes if ctx.wants[1] else []
    ctx.save_for_backward(w, weight, offsets, seed, *kept)
    ctx.set_materialize_grads(False)


def _formula_ste(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 9
    w, weight, offsets, seed, *codes = ctx.saved_tensors
    operands = (grad, w, codes, weight, ctx.layout, offsets, ctx.code, seed, None)
    dx, dw, _ = ops.linear_experts_backward(*operands, ctx.k, ctx.x_dtype, ctx.wants)
    want_x, want_w, _ = ctx.wants
    return dx if want_x else None, dw if want_w else None, *(None,) * 7


gradient("linear_experts_ste", _setup_ste, _formula_ste)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, layout, offsets, bias, code, ctx.activation, _, factor = inputs
    ctx.layout, ctx.code, ctx.k, ctx.x_dtype = layout, [*code, *_FROZEN], x.shape[-1], x.dtype
    ctx.wants = [x.requires_grad, False, bias is not None and bias.requires_grad]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(weight, offsets, factor)
    ctx.set_materialize_grads(False)


def _formula(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    """Computes (X3) with frozen weights: the gradients of x and of the biases."""
    if grad is None:
        return (None,) * 9
    if ctx.activation != "none":
        raise NotImplementedError(
            f"qfx::linear_experts has a gradient without an activation function only, not with "
            f"{ctx.activation!r}: apply it to the output"
        )
    weight, offsets, factor = ctx.saved_tensors
    operands: Any = (grad, None, [], weight, ctx.layout, offsets, ctx.code, None, factor)
    dx, _, db = ops.linear_experts_backward(*operands, ctx.k, ctx.x_dtype, ctx.wants)
    want_x, _, want_bias = ctx.wants
    d_bias = db.to(ctx.bias_dtype) if want_bias else None
    return dx if want_x else None, None, None, None, d_bias, *(None,) * 4


gradient("linear_experts", _setup, _formula)
