"""Bad arguments: an error sentence with the numbers, never a crash."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qfx.graph.activations import ACTIVATIONS
from qfx.ops.code import Code
from qfx.ops.header import HEADER_BYTES
from qfx.ops.layout import Layout

ops = torch.ops.qfx
ASYMMETRIC, OF_ROWS = Code(symmetric=0), Layout(6)
X, W_SCALE = torch.randn(5, 8), torch.ones(6)
PACKED = ops.pack_weight(torch.ones(6, 8, dtype=torch.int8), W_SCALE)
Q, SCALE, ZERO = ops.quantize(X, ASYMMETRIC)


def dynamic(
    x: Tensor = X, weight: Tensor = PACKED, layout: Layout = OF_ROWS, **other: Any
) -> Tensor:
    how = {"bias": None, "code": ASYMMETRIC, "activation": "none", "out_dtype": torch.float32}
    return ops.linear_dynamic(x, weight, layout, **{**how, **other})


def rotate(x: Tensor = X, factor: Tensor | None = None, rotation: int = 0) -> Tensor:
    return ops.rotate(x, factor, rotation)


def linear(
    q: Tensor = Q,
    scale: Tensor = SCALE,
    zero: Tensor = ZERO,
    weight: Tensor = PACKED,
    layout: Any = OF_ROWS,
) -> Tensor:
    return ops.linear(q, scale, zero, weight, layout, None, "none", torch.float32)


def dequantize(q: Tensor = Q, scale: Tensor = SCALE, **other: Any) -> Tensor:
    how = {"zero_point": None, "col_scale": None, "bias": None, "activation": "none"}
    return ops.dequantize(q, scale, *{**how, **other}.values(), torch.float32)


def pack(codes: Tensor = Q, scale: Tensor = SCALE, group: int = 0, **other: Any) -> Tensor:
    return ops.pack_weight(codes, scale, group=group, **other)


def guarded(**other: Any) -> Tensor:
    how = {"x": X, "w": torch.ones(6, 8), "weight": PACKED, "layout": OF_ROWS}
    how |= {"error": torch.ones(2), "bias": None, "guard": 0.1, "site": "", "code": Code()}
    how |= {"activation": "none", "out_dtype": torch.float32}
    return ops.linear_guarded(**{**how, **other})


CODES, SCALES = torch.ones(6, 100, dtype=torch.int8), torch.ones(6, 2)
IN_64 = Layout(6, group=64, scale_group=64)
GROUPED = pack(CODES, SCALES, 64)
LONG = torch.ones(1, 33026, dtype=torch.int8)


def groups(q: Tensor = CODES[:5], weight: Tensor = GROUPED, scale: Tensor = SCALE) -> Tensor:
    return linear(q, scale, ZERO, weight, IN_64)


def damaged(at: int, byte: int) -> Tensor:
    packed = PACKED.clone()
    packed[at] = byte
    return packed


SIZE = len(PACKED)
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "wrong_k": (
        lambda: dynamic(torch.randn(5, 7)),
        "linear_dynamic: x has K=7 (shape 5x7) but the weight was packed for K=8",
    ),
    "wrong_k_of_codes": (lambda: linear(Q[:, :7]), "x has K=7 (shape 5x7) but the weight"),
    "wrong_n": (lambda: dynamic(layout=Layout(7)), "the weight was packed for N=6"),
    "wrong_n_of_mm": (lambda: ops.int8_mm(Q, ZERO, PACKED, 5), "N=5 is asked for"),
    "wrong_n_of_scale": (lambda: ops.weight_scale(PACKED, 5), "weight_scale: N=5 is asked for"),
    "layout_length": (lambda: linear(layout=[6, 8]), "linear: layout has 2 numbers, expected n, "),
    "code_length": (lambda: dynamic(code=[8]), "linear_dynamic: code has 1 numbers, expected bit"),
    "double": (lambda: dynamic(X.double()), "x has dtype Double, expected Float or BFloat16 or"),
    "integer_x": (lambda: dynamic(Q), "x has dtype Char, expected Float"),
    "integer_x_of_float": (
        lambda: ops.linear_float(Q, PACKED, OF_ROWS, None, "none", torch.float32),
        "linear_float: x has dtype Char, expected Float",
    ),
    "float_codes": (lambda: linear(X), "q has dtype Float, expected Char"),
    "two_codes": (
        lambda: ops.linear_ste(
            X, None, None, None, None, [Q, SCALE], PACKED, OF_ROWS, [*Code(), 8, 0], None,
            torch.float32,
        ),
        "linear_ste: codes has 2 tensors, expected",
    ),
    "scalar_x": (lambda: dynamic(torch.tensor(1.0)), "x is a scalar"),
    "bias_length": (lambda: dynamic(bias=torch.ones(5)), "bias has shape 5, expected 6"),
    "bias_type": (lambda: dynamic(bias=torch.ones(6).int()), "bias has dtype Int"),
    "bits": (lambda: dynamic(code=Code(9)), "bits=9 is outside 2..8"),
    "axes": (
        lambda: ops.fake_quantize(X, [0], 8, True, torch.float32),
        "axes=[0], expected [1]",
    ),
    "code_group": (
        lambda: ops.quantize(X, Code(group=48)),
        "quantize: group=48, expected a multiple of 32",
    ),
    "code_of_groups_and_tensor": (
        lambda: ops.quantize(X, Code(per_tensor=1, group=32)),
        "code has groups of 32 and one scale for the tensor, expected one of them",
    ),
    "activation": (
        lambda: dynamic(activation="softmax"),
        f"unknown activation 'softmax', expected one of {', '.join(ACTIVATIONS)}",
    ),
    "out_dtype": (lambda: dynamic(out_dtype=torch.int8), "out_dtype is Char"),
    "scale_count": (
        lambda: linear(scale=torch.ones(4, 1)),
        "scale has shape 4x1, expected one value, one for each of 5 rows",
    ),
    "zero_count": (lambda: linear(zero=ZERO[:3]), "zero_point has shape 3x1, expected one value"),
    "zero_type": (lambda: linear(zero=ZERO.long()), "zero_point has dtype Long, expected Int"),
    "static_scale_count": (
        lambda: ops.quantize(X, Code(), torch.ones(4, 1)),
        "scale has 4 elements, expected one for each of the 5 rows or a single one",
    ),
    "static_zero_alone": (
        lambda: ops.quantize(X, Code(), None, ZERO),
        "quantize: zero_point is given without a scale",
    ),
    "dequantize_zero": (lambda: dequantize(zero_point=ZERO[:1]), "zero_point has 1 elements but"),
    "dequantize_columns": (
        lambda: dequantize(col_scale=torch.ones(7)),
        "col_scale has shape 7, expected 8",
    ),
    "dequantize_float": (lambda: dequantize(X), "q has dtype Float, expected Char or Int"),
    "magic": (lambda: dynamic(weight=damaged(0, 0)), "does not start with the magic bytes QFXW"),
    "binary": (
        lambda: dynamic(weight=ops.binary_pack(torch.ones(6, 8000))),
        "does not start with the magic bytes QFXW that pack_weight writes",
    ),
    "version": (
        lambda: dynamic(weight=damaged(4, 9)),
        "it has version 9, this build reads version 4",
    ),
    "header_bits": (
        lambda: dynamic(weight=damaged(8, 7)),
        "its header says 7 bits, expected 4, 5 or 8",
    ),
    "header_shift": (
        lambda: dynamic(weight=damaged(12, 2)),
        "its header says shift 2 and scales of type 0 beside 8 bits",
    ),
    "header_scales": (
        lambda: dynamic(weight=damaged(16, 1)),
        "its header says shift 0 and scales of type 1 beside 8 bits",
    ),
    "header_magnitude": (lambda: dynamic(weight=damaged(20, 7)), "its header is damaged"),
    "header_n": (lambda: dynamic(weight=damaged(24, 99)), "N=99 K=8 in 8 bits takes"),
    "header_k": (lambda: dynamic(weight=damaged(39, -1)), "its header says N=6 K=-"),
    "header_group": (lambda: dynamic(weight=damaged(40, 3)), "its header says groups of 3"),
    "header_scale_group": (
        lambda: dynamic(weight=damaged(48, 64)),
        "its header says scales of 64 in groups of 0",
    ),
    "header_contents": (lambda: dynamic(weight=damaged(57, 7)), "its header is damaged"),
    "header_reserved": (
        lambda: dynamic(weight=damaged(64 + 8, 1)),
        "the reserved bytes of its header are not zero",
    ),
    "truncated": (
        lambda: dynamic(weight=PACKED[:-1]),
        f"it has {SIZE - 1} bytes, N=6 K=8 in 8 bits takes {SIZE}",
    ),
    "too_long": (
        lambda: dynamic(weight=torch.cat([PACKED, PACKED[:64]])),
        f"it has {SIZE + 64} bytes, N=6 K=8 in 8 bits takes {SIZE}",
    ),
    "no_header": (lambda: dynamic(weight=PACKED[:9]), "it has 9 bytes, fewer than the header's"),
    "packed_matrix": (
        lambda: dynamic(weight=PACKED[None]),
        f"the packed weight has shape 1x{SIZE}, pack_weight returns one dimension",
    ),
    "packed_type": (lambda: dynamic(weight=PACKED.int()), "the packed weight has dtype Int"),
    "pack_vector": (lambda: pack(Q[0]), "pack_weight: codes have shape 8, expected [N, K]"),
    "pack_float": (lambda: pack(X), "pack_weight: codes has dtype Float, expected Char"),
    "pack_long_k": (
        lambda: pack(torch.zeros(1, 65793, dtype=torch.int8), SCALE[:1]),
        "K=65793 is above 65792",
    ),
    "pack_group": (
        lambda: pack(group=48),
        "pack_weight: group=48, expected 0 (one scale for all of K) or a multiple of 32",
    ),
    "pack_scale": (
        lambda: pack(CODES, torch.ones(6, 3), 64),
        "scale has shape 6x3, expected 6, 6x1 or 6x2: one for each row, or for each group of 64 of "
        "K=100",
    ),
    "pack_scale_type": (lambda: pack(scale=SCALE.double()), "scale has dtype Double, expected Flo"),
    "pack_zero_type": (
        lambda: pack(zero_point=SCALE),
        "pack_weight: zero_point has dtype Float, expected Int",
    ),
    "pack_zero": (
        lambda: pack(CODES, SCALES, 64, zero_point=torch.ones(6, 1).int()),
        "zero_point has shape 6x1, expected 6x2 as scale has",
    ),
    "pack_minimum": (
        lambda: pack(minimum=SCALE),
        "a minimum is given for 8 bits, expected a zero point or neither",
    ),
    "pack_long_group": (
        lambda: pack(LONG, SCALE[:1], zero_point=ZERO[:1]),
        "a group of 33026 with zero points is above 33025",
    ),
    "rotation": (lambda: rotate(rotation=32), "rotate: rotation=32, expected 0, 16 or 64"),
    "rotation_dynamic": (
        lambda: dynamic(code=Code(rotation=-64)),
        "linear_dynamic: rotation=-64, expected 0, 16 or 64",
    ),
    "factor_length": (
        lambda: ops.quantize(X, Code(), factor=torch.ones(7)),
        "quantize: factor has shape 7 but x has K=8 (shape 5x8), expected one element for each k",
    ),
    "factor_matrix": (lambda: rotate(factor=torch.ones(1, 8)), "factor has shape 1x8 but x has K"),
    "factor_type": (lambda: rotate(factor=torch.ones(8).half()), "factor has dtype Half, expected"),
    "rotation_static": (
        lambda: ops.quantize(X, Code(rotation=128), SCALE),
        "quantize: rotation=128, expected 0, 16 or 64",
    ),
    "rotate_integers": (lambda: rotate(Q), "rotate: x has dtype Char, expected Float"),
    "groups_k": (lambda: groups(Q), "x has K=8 (shape 5x8) but the weight was packed for K=100"),
    "groups_of_x": (
        lambda: dynamic(CODES.float(), GROUPED, IN_64, code=Code(group=32)),
        "group=32, expected 0 or the 64 that the weight was packed in",
    ),
    "groups_of_x_and_rows": (
        lambda: dynamic(code=Code(group=32)),
        "group=32, but the weight was packed in one group",
    ),
    "groups_scale": (
        lambda: groups(scale=torch.ones(5, 3)),
        "scale has shape 5x3, expected one value, one for each of 5 rows, or one for each of their "
        "2 groups",
    ),
    "unpack_k": (lambda: ops.unpack_weight(PACKED, OF_ROWS, 9), "the weight was packed for K=8"),
    "guarded_w": (lambda: guarded(w=torch.ones(6, 9)), "w has shape 6x9, expected 6x8"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_error_sentence(name: str) -> None:
    call, phrase = CALLS[name]
    with pytest.raises(RuntimeError, match=re.escape(phrase)):
        call()


N, K = 33, 200
CODES_OF_W, X200 = torch.ones(N, K, dtype=torch.int8), torch.ones(5, K)
SOME_GROUPS = torch.ones(N, 4)
LAYOUTS = {
    "rows": (Layout(N), (torch.ones(N),)),
    "zeros": (Layout(N, shift=1), (torch.ones(N), torch.ones(N).int())),
    "groups": (Layout(N, 8, 64, 64), (SOME_GROUPS,)),
    "few_bits": (Layout(N, 4, 64, 64), (SOME_GROUPS,)),
    "minimums": (Layout(N, 5, 64, 64, 1), (SOME_GROUPS, None, SOME_GROUPS)),
}


def packed_as(name: str) -> Tensor:
    layout, values = LAYOUTS[name]
    shifts = (*values, None, None)[:3]
    return ops.pack_weight(CODES_OF_W, *shifts, layout.bits, layout.group)


def _linear(name: str) -> Callable[[Tensor], Any]:
    return lambda p: linear(X200.char(), weight=p, layout=LAYOUTS[name][0])


PACKS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Any]]] = {
    **{name: (functools.partial(packed_as, name), _linear(name)) for name in LAYOUTS},
    "float": (
        lambda: packed_as("few_bits"),
        lambda p: ops.linear_float(X200, p, LAYOUTS["few_bits"][0], None, "none", torch.float32),
    ),
    "unpacked": (
        lambda: packed_as("minimums"),
        lambda p: ops.unpack_weight(p, LAYOUTS["minimums"][0], K),
    ),
    "scale": (lambda: packed_as("rows"), lambda p: ops.weight_scale(p, N)),
    "bits": (lambda: ops.binary_pack(CODES_OF_W), lambda p: ops.binary_mm(X200, p, N)),
}


@pytest.mark.parametrize("name", PACKS)
def test_any_changed_byte_of_a_packed_weight_is_noticed(name: str) -> None:
    """At its first use; each copy has an address of its own, where nothing is known yet."""
    pack, use = PACKS[name]
    good = pack()
    places = [*range(HEADER_BYTES), *range(HEADER_BYTES, len(good), 61), len(good) - 1]
    copies = good.repeat(len(places) + 1, 1)
    use(copies[-1])
    for i, place in enumerate(places):
        copies[i, place] ^= 1 << (i % 7)
        with pytest.raises(RuntimeError, match=r"not a packed weight of this build: "):
            use(copies[i])


@pytest.mark.parametrize("operand", ["x", "weight", "bias"])
def test_operands_on_another_device(operand: str) -> None:
    """Meta stands in for any other device."""
    call = {"x": X, "weight": PACKED, "bias": torch.ones(6)}
    call[operand] = call[operand].to("meta")
    with pytest.raises(RuntimeError, match="operands are on cpu and meta; move all to one device"):
        dynamic(**call)


def test_codes_in_a_list_on_another_device() -> None:
    codes = [Q, SCALE.to("meta"), ZERO]
    how = (codes, PACKED, OF_ROWS, [*ASYMMETRIC, 8, 0], None, torch.float32)
    with pytest.raises(RuntimeError, match="operands are on cpu and meta; move all to one device"):
        ops.linear_ste(X, None, None, None, None, *how)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nonsense_raises_python_exceptions_only(seed: int) -> None:
    command = [sys.executable, "-m", "tests.lib.nonsense", str(seed), "600"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"seed {seed}: {result.returncode}\n{result.stderr[-2000:]}"
    returned, raised, megabytes = map(int, re.findall(r"\d+", result.stdout))
    assert returned + raised == 600 and returned and raised and megabytes < 200
