"""Every operator has all its parts, passes opcheck, and its kernel equals its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import qfx._C as _C
from qfx.graph.activations import ACTIVATIONS, activate
from qfx.ops import FAKES, REFERENCES
from qfx.ops.heads import matched
from qfx.ops.legacy_operators import NAMES as FORMER
from qfx.ops.registry import IN_PYTHON, NO_GRADIENT
from tests.conftest import on_isa, same_bits
from tests.cuda import emulator as cuda_emulator
from tests.lib import bounds
from tests.lib.pairs import LONG, covering, values
from tests.lib.rows import ALL_ROWS, CACHED, ROWS, Row, results

# defined there alone
PYTHONS = ("low_bit_pack", "low_bit_unpack", "value_linear", "weight_only_linear", *FORMER)
OPS = sorted(
    {
        schema.name.removeprefix("qfx::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("qfx::")
    }
    - {*PYTHONS}
)
FLOAT_OUT = (
    "dequantize", "linear", "linear_dynamic", "linear_experts", "linear_float", "binary_linear",
)  # fmt: skip
INTEGERS_OUT = ("binary_pack", "binary_mm", "pack_weight")  # autograd takes these for constants
WITHOUT_GRADIENT = (
    "quantize",
    "fake_quantize",
    "int8_attention_backward",
    "attention_decode",
    "attention_append",
    "kv_keys",
    "kv_values",
    "kv_attention",
    "kv_attention_pages",
    "int8_bmm_dynamic",
    "linears",
    "conv_dynamic",
    "conv_depthwise",
    "im2col_backward",
    "experts_backward",
    "linear_experts_backward",
    "frozen_gradient",
    "lstm_backward",
    "gru_backward",
    "lstm_float",
    "gru_float",
    "linear_requantize",
    "linear_guarded",
    *(op for op in FLOAT_OUT if op != "linear_experts"),
)
# Operators without CUDA kernels, and why.
WITHOUT_CUDA = {
    **dict.fromkeys(
        ("int8_attention", "int8_attention_backward", "attention_decode", "attention_append"),
        "attention stays float on CUDA, where the float kernels keep to tensor cores",
    ),
    **dict.fromkeys(
        CACHED,
        "codes lie as the CPU's loops read them, 16 keys side by side; on CUDA a cache stays float",
    ),
    "linears": "on CUDA codes are Inductor's, or one launch whose codes each `linear` reads",
    **dict.fromkeys(
        (
            "linear_experts",
            "linear_experts_ste",
            "linear_experts_backward",
            "experts",
            "experts_backward",
        ),
        "experts stay float on CUDA, where their rows are known on the device alone",
    ),
    **dict.fromkeys(
        ("im2col", "im2col_backward", "conv_dynamic", "conv_depthwise"),
        "convolutions stay float on CUDA, where no kernel reads windows",
    ),
    **dict.fromkeys(
        ("lstm", "lstm_backward", "lstm_float", "gru", "gru_backward", "gru_float"),
        "recurrent layers stay float on CUDA, where one launch of cuDNN runs all steps",
    ),
    "frozen_gradient": "on CUDA a weight is turned at each step, by the operators that are there",
    "cut_weight": "weights are cut on the CPU, before they move to a GPU",
    "linear_guarded": "the guard falls back by row, which the host would have to wait for",
}
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _op(name: str) -> Any:
    return getattr(torch.ops.qfx, name).default


@pytest.mark.parametrize("name", OPS)
def test_all_parts(name: str) -> None:
    assert name in REFERENCES and name in FAKES
    assert (name in NO_GRADIENT) == (name in WITHOUT_GRADIENT + INTEGERS_OUT)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"qfx::{name}", "CPU")
    assert any(row.op == name for row in ROWS)


@pytest.mark.parametrize("name", OPS)
def test_cuda_kernels_or_a_reason(name: str) -> None:
    """Seen on the emulator, whose library has the operators for CUDA as operators for the CPU."""
    cuda_emulator.library()
    emulated = f"qfx_emulated::{name}"
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    there = name not in IN_PYTHON and kernel(emulated, "CPU")
    assert there == (name not in WITHOUT_CUDA)


def test_the_table_knows_the_operators() -> None:
    assert len(OPS) >= 10 and {row.op for row in ROWS} == set(OPS)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _attention_bound(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """An exponential that is not quite the reference's moves each integer probability by at most
    one, and the weights' sum; rotated back, the outputs' errors add up. Then two roundings."""
    _, _, v = matched(q, k, v)
    n, e = v.shape[-2:]
    if 0 in (n, e):
        return torch.zeros(())
    block = next((size for size in (64, 16) if e % size == 0), 0)
    codes = REFERENCES["rotate"](v.float(), None, block).double().abs().amax((-2, -1), keepdim=True)
    moved = max(block, 1) ** 0.5 * codes * (1.5 * n / 65535 + 2.0**-17)
    largest = v.double().abs().amax(-2, keepdim=True) * 1.01
    return moved + 4 * ROUNDOFF[rest[-1]] * (largest + moved) + 2.0**-25


def _grown(q: Tensor, past_k: Tensor, k: Tensor, past_v: Tensor, v: Tensor, *rest: Any) -> Any:
    return q, torch.cat([past_k, k], -2), torch.cat([past_v, v], -2), *rest


def _close_gradients(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """An exponential that is not quite the reference's moves a code by one now and then."""
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        few = e.numel() < 4096
        error, norm = (g.double() - e.double()).norm(), e.double().norm()
        assert error <= (0.02 if few else 2e-3) * norm + 1e-6


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_kernel_equals_reference(row: Row) -> None:
    """On every instruction set; the last that is printed is the one that fails."""
    arguments = row.arguments()
    equal = equality(row, arguments, results(row.op, REFERENCES[row.op], arguments))
    for isa in _C.isas():
        print(isa)
        with on_isa(isa):
            equal(results(row.op, _op(row.op), arguments))


def assert_equals(
    row: Row, arguments: tuple[Any, ...], got: tuple[Tensor, ...], expected: tuple[Tensor, ...]
) -> None:
    equality(row, arguments, expected)(got)


def equality(
    row: Row, arguments: tuple[Any, ...], expected: tuple[Tensor, ...]
) -> Callable[[tuple[Tensor, ...]], None]:
    """What asserts that results are these, bit for bit; gradients of attention but for a few
    codes; the first of attentions within their bounds, and activations, which approximate, within
    4 * 2^-24 * max(1, |v|)."""
    if row.op == "int8_attention_backward":
        return lambda got: _close_gradients(got, expected)
    exact, bound = expected[0].double(), None
    if row.op == "int8_attention":
        bound = _attention_bound(*arguments)
    elif row.op == "kv_attention":
        bound = bounds.kv_attention(*arguments)
    elif row.op == "kv_attention_pages":
        bound = bounds.kv_attention_pages(*arguments)
    elif row.op in ("attention_decode", "attention_append"):
        grown = _grown(*arguments) if row.op == "attention_append" else arguments
        bound = bounds.attention_decode(*grown)
    elif row.activation not in ("none", "relu") and row.op in FLOAT_OUT:
        v = REFERENCES[row.op](**_without_activation(row.op, arguments)).double()
        exact = activate(row.activation, v)
        bound = 4 * 2.0**-24 * v.abs().clamp_min(1)
        bound = bound + (exact.abs() + bound) * ROUNDOFF[row.out_dtype] + 2.0**-25

    def check(got: tuple[Tensor, ...]) -> None:
        for g, e in zip(got, expected, strict=True):
            assert g.dtype == e.dtype and g.shape == e.shape
        if bound is not None:
            assert ((got[0].double() - exact).abs() <= bound).all()
        exactly = slice(0 if bound is None else 1, None)
        assert all(same_bits(g, e) for g, e in zip(got[exactly], expected[exactly], strict=True))

    return check


def _without_activation(op: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    names = [a.name for a in _op(op)._schema.arguments]
    named = dict(zip(names, arguments, strict=True))
    return {**named, "activation": "none", "out_dtype": torch.float32}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_error_on_a_dense_sweep(activation: str, isa: str) -> None:
    """Over +-110 and, densely, +-8; measured about 2 * 2^-24 * max(1, |v|), bounded by 4. (E2)"""
    near = torch.arange(-8_000_000, 8_000_001, 17, dtype=torch.int32)
    v = torch.cat([near, torch.arange(-110_000_000, 110_000_001, 1009, dtype=torch.int32)])
    one = torch.tensor([1e-6])
    y = _op("dequantize")(v[None], one, None, None, None, activation, torch.float32)[0].double()
    v = (v.float() * one).double()
    error = (y - activate(activation, v)).abs() / v.abs().clamp_min(1)
    assert error.max() <= 4 * 2.0**-24


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_infinity_and_nan(activation: str, isa: str) -> None:
    """Infinity stays infinity, except in relu6; NaN, and 0 * -infinity inside gelu and silu, are
    NaN."""
    codes = torch.tensor([[1, -1, 0]], dtype=torch.int32)
    infinite = torch.tensor([torch.inf])
    y = _op("dequantize")(codes, infinite, None, None, None, activation, torch.float32)[0]
    high, low = (activate(activation, torch.tensor(v)).item() for v in (torch.inf, -torch.inf))
    expected = torch.tensor([high, low, torch.nan])
    assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7))


def _kind(row: Row) -> Row:
    """The row with all its sizes 0, 1 or 2 and without what changes values alone. Packing has no
    kinds: its fake computes a size of every size."""
    if "pack" in row.op:
        return row
    leading = tuple(min(size, 2) for size in row.leading)
    sizes = {name: min(getattr(row, name), 2) for name in ("k", "n", "group", "rotation")}
    return replace(row, leading=leading, **sizes, bits=8, activation="none")


def _size(row: Row) -> int:
    return math.prod(row.leading) * row.k * max(row.n, 1)


def _of_each_operator(row: Row) -> list[Hashable]:
    """Every value that a field has with this operator; of sizes, how many there are and whether
    one of them is 0."""
    sizes = {
        "leading": (len(row.leading), 0 in row.leading),
        "k": row.k == 0,
        "n": row.n == 0,
        "group": row.group > 0,
    }
    return [(row.op, *each) for each in (values(row) | sizes).items()]


# The first row of each kind; none so large that it is there for its size alone. In the quick
# profile those of each operator that have all values of its fields. What traces with dynamic shapes
# takes ten times as long as the rest: the quick profile asks it of a few of each operator.
SMALL = [row for row in ALL_ROWS if _size(row) < 1 << 20]
FIRST = list({_kind(row): row for row in reversed(SMALL)}.values())[::-1]
KINDS = covering(FIRST, _of_each_operator)
MOST = None if LONG else 2
TRACED = {
    row
    for op in OPS
    for row in sorted((r for r in KINDS if r.op == op), key=lambda r: _size(r) == 0)[:MOST]
}
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("row", KINDS, ids=str)
def test_opcheck(row: Row) -> None:
    """Schema, fake implementation, autograd registration; of some, with dynamic shapes too."""
    traced = ("test_aot_dispatch_dynamic",) if row in TRACED else ()
    torch.library.opcheck(_op(row.op), row.arguments(), test_utils=(*QUICK, *traced))


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_backward_is_an_error_sentence(name: str) -> None:
    """Whichever of the float operands records gradients, those in lists among them."""
    arguments, tree = tree_flatten(next(r for r in ROWS if r.op == name).arguments())
    floats = [i for i, a in enumerate(arguments) if _is_float(a)]
    for recording in (floats, *([i] for i in floats)):
        leaves = [
            a.clone().requires_grad_() if i in recording else a for i, a in enumerate(arguments)
        ]
        operands = tree_unflatten(leaves, tree)
        result = next(r for r in as_tuple(_op(name)(*operands)) if _is_float(r))
        with pytest.raises(NotImplementedError, match=rf"qfx::{name} is an inference operator"):
            result.sum().backward()


def _is_float(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point()
