"""The grammar of the fuzz test: one row per operation.

A row is the algebra (source text), how its operands are found or made in a `Draft`, and its bound:
a rule of `tests/lib/bounds.py`, or a `Product`, or None where the text itself, run on the errors,
gives the errors of its result, because it only moves or selects elements. Lower case placeholders
are tensors, the operands of the rule in this order; upper case ones are literals.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.fuzz.makers import (
    Make,
    alike,
    any_of,
    attended,
    attended_before_large_keys,
    attended_but_for_large_keys,
    attended_by_pairs,
    attended_in_part,
    broadcast,
    converted,
    dim,
    expanded,
    fold,
    indexed,
    linear,
    masked,
    matrix_bias,
    narrow,
    order,
    output,
    overwritten,
    overwritten_slice,
    rank,
    same_shapes,
    split_last,
    split_one,
    state,
    three_activations,
    two_activations,
    two_dims,
    weight_and_bias,
    writable,
)
from tests.lib import bounds
from tests.lib.bounds import Attention, Known, Rule


class Product(NamedTuple):
    """Bilinear in x and w, K on these axes of each; the bound allows both to be quantized.

    `int8`: qfx quantizes it whenever w is a constant of the model. `window`: x's last axis is cut
    into as many windows of that size as fit, which are two axes of the matrix x_mk.
    """

    x_axes: tuple[int, ...] = (-1,)
    w_axes: tuple[int, ...] = (-1,)
    int8: bool = True
    window: int = 0

    def cut(self, x: Known) -> Known:
        """x with its windows apart."""
        if not self.window:
            return x
        used = x.v.shape[-1] // self.window * self.window
        return Known(*(t[..., :used].unflatten(-1, (-1, self.window)) for t in x))

    def joined(self, x: Known) -> Known:
        return Known(*(t.flatten(-2) for t in x)) if self.window else x


class Op(NamedTuple):
    text: str
    make: Make
    bound: Rule | Product | Attention | None = None
    writes: bool = False  # the first operand is overwritten

    @property
    def operands(self) -> list[str]:
        """The placeholders of tensors, in the order in which the text has them first."""
        found = re.findall(r"\{([a-z]+)\}", self.text)
        return [name for name in dict.fromkeys(found) if name not in ("out", "other")]


NK, KN = Product(), Product(w_axes=(-2,))
LEFT = Product(x_axes=(-2,))
CONV = Product(x_axes=(1,), w_axes=(1,))
PATCHES = Product(x_axes=(1, -1), w_axes=(1, 3), window=2)
SCALED = Product(w_axes=(-2,), int8=False)
COMPUTED = Product(w_axes=(-2,), int8=False)
PRODUCTS = {
    "linear": Op("{out} = F.linear({x}, {w})", linear("nk"), NK),
    "linear_bias": Op("{out} = F.linear({x}, {w}, {b})", linear("nk", bias=True), NK),
    "linear_keywords": Op(
        "{out} = F.linear(bias={b}, weight={w}, input={x})", linear("nk", bias=True), NK
    ),
    "operator": Op("{out} = {x} @ {w}", linear("kn"), KN),
    "matmul": Op("{out} = torch.matmul({x}, {w})", linear("kn"), KN),
    "matmul_method": Op("{out} = {x}.matmul({w})", linear("kn"), KN),
    "matmul_keywords": Op("{out} = torch.matmul(other={w}, input={x})", linear("kn"), KN),
    "matmul_bias": Op("{out} = {x} @ {w} + {b}", linear("kn", bias=True), KN),
    "bias_matmul": Op("{out} = torch.add({b}, {x} @ {w})", linear("kn", bias=True), KN),
    "left": Op("{out} = {w} @ {x}", linear("left"), LEFT),
    "rmatmul": Op("{out} = {w}.__rmatmul__({x})", linear("kn"), KN),
    "mm": Op("{out} = torch.mm({x}, {w})", linear("kn", rank(2)), KN),
    "mm_method": Op("{out} = {x}.mm({w})", linear("kn", rank(2)), KN),
    "mm_keywords": Op("{out} = torch.mm({x}, mat2={w})", linear("kn", rank(2)), KN),
    "addmm": Op("{out} = torch.addmm({b}, {x}, {w})", linear("kn", rank(2), bias=True), KN),
    "addmm_method": Op("{out} = {b}.addmm({x}, {w})", linear("kn", rank(2), bias=True), KN),
    "addmm_keywords": Op(
        "{out} = torch.addmm({b}, mat1={x}, mat2={w}, beta=1, alpha=1)",
        linear("kn", rank(2), bias=True), KN,
    ),
    "addmm_scaled": Op(
        "{out} = torch.addmm({b}, {x}, {w}, beta=0.5, alpha=2)",
        linear("kn", rank(2), bias=True), SCALED,
    ),
    "addmm_matrix": Op("{out} = torch.addmm({b}, {x}, {w})", matrix_bias, SCALED),
    "conv1d": Op("{out} = F.conv1d({x}, {w}, {b})", linear("conv1d", rank(3), bias=True), CONV),
    "conv1d_stride": Op("{out} = F.conv1d({x}, {w}, stride=2)", linear("conv1d", rank(3)), CONV),
    "conv2d": Op("{out} = F.conv2d({x}, {w}, {b})", linear("conv2d", rank(4), bias=True), CONV),
    "patches": Op(
        "{out} = F.conv2d({x}, {w}, stride=(1, 2))",
        linear("patches", lambda t: t.ndim == 4 and t.shape[3] > 1), PATCHES,
    ),
    "einsum": Op('{out} = torch.einsum("...k,kn->...n", {x}, {w})', linear("kn"), KN),
    "einsum_nk": Op('{out} = torch.einsum("...k,nk->...n", {x}, {w})', linear("nk"), NK),
    "einsum_left": Op(
        '{out} = torch.einsum("nk,...km->...nm", {w}, {x})', linear("left"), LEFT
    ),
    "heads": Op('{out} = torch.einsum("bsk,hdk->bhsd", {x}, {w})', linear("heads", rank(3)), NK),
    "bmm": Op("{out} = torch.bmm({x}, {w})", two_activations(rank(3)), COMPUTED),
    "baddbmm": Op("{out} = torch.baddbmm({b}, {x}, {w})", three_activations, COMPUTED),
    "activations": Op("{out} = {x} @ {w}", two_activations(), COMPUTED),
    "attention": Op(
        "{out} = F.scaled_dot_product_attention({q}, {k}, {v})", attended, Attention()
    ),
    "attention_causal": Op(
        "{out} = F.scaled_dot_product_attention({q}, {k}, {v}, is_causal=True)",
        attended, Attention(causal=True),
    ),
    "attention_masked": Op(
        "{out} = F.scaled_dot_product_attention({q}, {k}, {v}, {mask})",
        attended_in_part, Attention(),
    ),
    "attention_hidden": Op(
        "{out} = F.scaled_dot_product_attention({q}, {k} * {LARGE}, {v} * {LARGE}, {mask})",
        attended_but_for_large_keys, Attention(),
    ),
    "attention_later": Op(
        "{out} = F.scaled_dot_product_attention({q}, torch.cat([{k}, {k} * {FACTOR}], -2), "
        "torch.cat([{v}, {v} * {FACTOR}], -2), is_causal=True)",
        attended_before_large_keys, Attention(causal=True),
    ),
    "attention_shared": Op(
        "{out} = F.scaled_dot_product_attention({q}, {k}[..., ::2, :, :], {v}[..., ::2, :, :], "
        "enable_gqa=True)",
        attended_by_pairs, Attention(groups=2),
    ),
}  # fmt: skip


class Weight(NamedTuple):
    """How a tensor [n, k, ...] comes from a stored one: by a view, or computed from it alone."""

    text: str
    stored: Callable[..., tuple[int, ...]] = lambda n, k, *more: (n, k, *more)
    matrix: bool = False  # has no further axes


def _swapped(n: int, k: int, *more: int) -> tuple[int, ...]:
    return (k, n, *more)


WEIGHTS = (
    Weight("{p}"),
    Weight("{p}.t()", _swapped, matrix=True),
    Weight("{p}.T", _swapped, matrix=True),
    Weight("{p}.mT", _swapped, matrix=True),
    Weight("{p}.transpose(0, 1)", _swapped),
    Weight("torch.transpose({p}, 1, 0)", _swapped),
    Weight("{p}.swapaxes(-1, -2)", _swapped, matrix=True),
    Weight("{p}.permute(1, 0)", _swapped, matrix=True),
    Weight("{p}.t().contiguous()", _swapped, matrix=True),
    Weight("{p}.detach()"),
    Weight("{p}.to({DTYPE})"),
    Weight("{p}.chunk(3)[1]", lambda n, *more: (3 * n, *more)),
    Weight("{p}[{N}:]", lambda n, *more: (2 * n, *more)),
    Weight("{p}[:, {K}:]", lambda n, k, *more: (n, 2 * k, *more)),
    Weight("{p}.split([1, {N}])[1]", lambda n, *more: (1 + n, *more)),
    Weight("{p}.narrow(1, 1, {K})", lambda n, k, *more: (n, k + 2, *more)),
    Weight("{p}[2]", lambda *shape: (3, *shape)),
    Weight("{p}.unbind(0)[1].mT", lambda n, k: (2, k, n), matrix=True),
    Weight("{p}.view({N}, {K})", lambda n, k: (1, n * k), matrix=True),
    Weight("{p}.squeeze(1)", lambda n, *more: (n, 1, *more), matrix=True),
    Weight("({p} * 0.75)"),
    Weight("torch.cat([{p}, {p}])[{N}:]"),
)


VIEWS = {
    "view": Op("{out} = {x}.view({SHAPE})", split_last),
    "reshape": Op("{out} = {x}.reshape({SHAPE})", split_last),
    "fold_view": Op("{out} = {x}.view({I}, {J})", fold(lambda t: t.is_contiguous())),
    "fold": Op("{out} = {x}.reshape({I}, {J})", fold(lambda t: True)),
    "flatten": Op("{out} = {x}.flatten({DIM})", dim()),
    "transpose": Op("{out} = {x}.transpose({I}, {J})", two_dims),
    "permute": Op("{out} = {x}.permute({DIMS})", order),
    "mT": Op("{out} = {x}.mT", any_of(lambda t: t.ndim > 1)),
    "slice": Op("{out} = {x}[..., {I}:{J}]", narrow),
    "rows": Op("{out} = {x}[::2]", any_of(lambda t: t.ndim > 1)),
    "select": Op("{out} = {x}[0]", any_of(lambda t: t.ndim > 1)),
    "last": Op("{out} = {x}[:, -1]", any_of(lambda t: t.ndim > 2)),
    "unsqueeze": Op("{out} = {x}.unsqueeze({DIM})", dim(lambda t: t.ndim < 4)),
    "expand": Op("{out} = {x}.expand(2, {STAR})", expanded),
    "chunk": Op("{out}, {other} = {x}.chunk(2, -1)", any_of(lambda t: t.shape[-1] > 1)),
    "split": Op("{out}, {other} = {x}.split([1, {REST}], -1)", split_one),
    "detach": Op("{out} = {x}.detach()", any_of()),
    "contiguous": Op("{out} = {x}.contiguous()", any_of()),
    "clone": Op("{out} = {x}.clone()", any_of()),
    "dropout": Op("{out} = F.dropout({x}, 0.5, training=False)", any_of()),
    "to_itself": Op("{out} = {x}.to({x}.dtype)", any_of()),
    "alias": Op("{out} = {x}", any_of()),
    "cat": Op("{out} = torch.cat([{x}, {y}], -1)", alike),
    "stack": Op("{out} = torch.stack([{x}, {y}])", alike),
    "flip": Op("{out} = {x}.flip({DIM})", dim()),
    "pad": Op("{out} = F.pad({x}, (1, 2))", any_of()),
    "gather": Op("{out} = {x}[{INDEX}]", indexed),
    "where": Op("{out} = torch.where({MASK}, {x}, {y})", masked),
}

gelu = bounds.smooth(bounds.STEEPEST, ulps=8)
ELEMENTWISE = {
    "add": Op("{out} = {x} + {y}", same_shapes, bounds.add),
    "residual": Op("{out} = torch.add({x}, {y})", same_shapes, bounds.add),
    "add_constant": Op("{out} = {x} + {y}", broadcast, bounds.add),
    "constant_add": Op("{out} = {y} + {x}", broadcast, bounds.add),
    "add_scaled": Op("{out} = torch.add({x}, {y}, alpha=2)", same_shapes, bounds.axpy(2)),
    "sub": Op("{out} = {x} - {y}", same_shapes, bounds.axpy(-1)),
    "mul": Op("{out} = {x} * {y}", same_shapes, bounds.mul),
    "mul_constant": Op("{out} = {x} * {y}", broadcast, bounds.mul),
    "scale": Op("{out} = {x} * 0.75", any_of(), bounds.affine(0.75, 0)),
    "divide": Op("{out} = {x} / 2", any_of(), bounds.affine(0.5, 0)),
    "shift": Op("{out} = 1 - {x}", any_of(), bounds.affine(-1, 1)),
    "neg": Op("{out} = -{x}", any_of(), bounds.slope(1)),
    "abs": Op("{out} = {x}.abs()", any_of(), bounds.slope(1)),
    "clamp": Op("{out} = {x}.clamp(-0.5, 2)", any_of(), bounds.slope(1)),
    "maximum": Op("{out} = torch.maximum({x}, {y})", alike, bounds.larger),
    "amax": Op("{out} = {x}.amax(-1, keepdim=True)", any_of(), bounds.largest),
    "mean": Op("{out} = {x}.mean(-1, keepdim=True)", any_of(), bounds.mean),
    "softmax": Op("{out} = F.softmax({x}, -1)", any_of(), bounds.softmax),
    "layer_norm": Op(
        "{out} = F.layer_norm({x}, {w}.shape, {w}, {b}, 1e-2)",
        weight_and_bias, bounds.norm(True, 1e-2),
    ),
    "rms_norm": Op(
        "{out} = {x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-2) * {w}",
        lambda d: d.named(x=(x := d.pick(lambda t: t.dtype == torch.float32)), w=x and d.constant(
            d.real[x].shape[-1:], torch.float32)),
        bounds.norm(False, 1e-2),
    ),
    "to": Op("{out} = {x}.to({DTYPE})", converted, bounds.cast),
}  # fmt: skip
ACTIVATIONS = {
    "relu": Op("{out} = F.relu({x})", any_of(), bounds.slope(1)),
    "relu_method": Op("{out} = {x}.relu()", any_of(), bounds.slope(1)),
    "leaky": Op("{out} = F.leaky_relu({x}, 0.25)", any_of(), bounds.slope(1)),
    "gelu": Op("{out} = F.gelu({x})", any_of(), gelu),
    "gelu_tanh": Op('{out} = F.gelu({x}, approximate="tanh")', any_of(), gelu),
    "silu": Op("{out} = F.silu({x})", any_of(), gelu),
    "tanh": Op("{out} = torch.tanh({x})", any_of(), bounds.smooth(1, ulps=8)),
    "sigmoid": Op("{out} = {x}.sigmoid()", any_of(), bounds.smooth(0.25, ulps=8)),
}
IN_PLACE = {
    "add_": Op("{x}.add_({y})", overwritten("any type"), bounds.add, writes=True),
    "iadd": Op("{x} += {y}", overwritten("same type"), bounds.add, writes=True),
    "imul": Op("{x} *= 0.75", writable(), bounds.affine(0.75, 0), writes=True),
    "mul_": Op("{x}.mul_({y})", overwritten("same type"), bounds.mul, writes=True),
    "sub_": Op("torch.Tensor.sub_({x}, {y})", overwritten("any type"), bounds.axpy(-1), True),
    "neg_": Op("{out} = {x}.neg_()", writable(), bounds.slope(1), writes=True),
    "relu_": Op("{x}.relu_()", writable(), bounds.slope(1), writes=True),
    "torch_relu_": Op("{out} = torch.relu_({x})", writable(), bounds.slope(1), writes=True),
    "relu_inplace": Op(
        "{out} = F.relu({x}, inplace=True)", writable(), bounds.slope(1), writes=True
    ),
    "silu_inplace": Op("F.silu({x}, inplace=True)", writable(), gelu, writes=True),
    "copy_": Op("{x}.copy_({y})", overwritten("any type"),
                lambda u, x, y: bounds.cast(u, y), writes=True),
    "copy_slice": Op("{x}[..., {I}:{J}].copy_({y}[..., {I}:{J}])", overwritten_slice),
    "set_item": Op("{x}[..., {I}:{J}] = {y}[..., {I}:{J}]", overwritten_slice),
    "set_rows": Op("{x}[0] = {y}[0]", overwritten("same type")),
    "zero_": Op("{x}.zero_()", writable()),
    "out": Op("torch.add({x}, {y}, out={z})", output,
              lambda u, z, x, y: bounds.add(u, x, y), writes=True),
}  # fmt: skip
STATE = {"state": Op("{x}.mul_(0.5)", state, bounds.affine(0.5, 0), writes=True)}
GROUPS = {
    "products": (PRODUCTS, 0.3), "views": (VIEWS, 0.22), "elementwise": (ELEMENTWISE, 0.18),
    "activations": (ACTIVATIONS, 0.1), "in_place": (IN_PLACE, 0.14), "state": (STATE, 0.06),
}  # fmt: skip
OPS = {name: op for group, _ in GROUPS.values() for name, op in group.items()}
