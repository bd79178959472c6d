"""Bad arguments: an error sentence with the numbers, never a crash."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qfx  # noqa: F401

ops = torch.ops.qfx
PACKED = ops.pack_weight(torch.ones(6, 8, dtype=torch.int8))
W_SCALE, X = torch.ones(6), torch.randn(5, 8)
Q, SCALE, ZERO = ops.quantize(X, [1], 8, False)


def dynamic(
    x: Tensor = X, packed: Tensor = PACKED, w_scale: Tensor = W_SCALE, **other: Any
) -> Tensor:
    how = {"bias": None, "axes": [1], "bits": 8, "symmetric": False}
    how |= {"activation": "none", "out_dtype": torch.float32, **other}
    return ops.int8_linear_dynamic(x, packed, w_scale, **how)


def rotate(x: Tensor = X, factor: Tensor | None = None, rotation: int = 0) -> Tensor:
    return ops.rotate(x, factor, rotation)


def linear(
    q: Tensor = Q, scale: Tensor = SCALE, zero: Tensor = ZERO, packed: Tensor = PACKED
) -> Tensor:
    return ops.int8_linear(q, scale, zero, packed, W_SCALE, None, "none", torch.float32)


def dequantize(q: Tensor = Q, scale: Tensor = SCALE, **other: Any) -> Tensor:
    how = {"zero_point": None, "col_scale": None, "bias": None, "activation": "none"}
    return ops.dequantize(q, scale, *{**how, **other}.values(), torch.float32)


GROUPED = ops.pack_weight(torch.ones(6, 100, dtype=torch.int8), 64)
CODES, SCALES = torch.ones(5, 100, dtype=torch.int8), torch.ones(6, 2)
LONG = torch.ones(1, 33026, dtype=torch.int8)


def groups(
    q: Tensor = CODES,
    packed: Tensor = GROUPED,
    w_scale: Tensor = SCALES,
    w_zero: Tensor | None = None,
) -> Tensor:
    how = (None, "none", torch.float32)
    return ops.int8_linear_groups(q, SCALE, ZERO, packed, w_scale, w_zero, *how)


def damaged(at: int, byte: int) -> Tensor:
    packed = PACKED.clone()
    packed[at] = byte
    return packed


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "wrong_k": (
        lambda: dynamic(torch.randn(5, 7)),
        "int8_linear_dynamic: x has K=7 (shape 5x7) but the weight was packed for K=8",
    ),
    "wrong_k_of_codes": (lambda: linear(Q[:, :7]), "x has K=7 (shape 5x7) but the weight"),
    "wrong_n": (lambda: dynamic(w_scale=torch.ones(7)), "the weight was packed for N=6"),
    "wrong_n_of_mm": (lambda: ops.int8_mm(Q, ZERO, PACKED, 5), "N=5 is asked for"),
    "double": (lambda: dynamic(X.double()), "x has dtype Double, expected Float or BFloat16 or"),
    "integer_x": (lambda: dynamic(Q), "x has dtype Char, expected Float"),
    "float_codes": (lambda: linear(X), "q has dtype Float, expected Char"),
    "scalar_x": (lambda: dynamic(torch.tensor(1.0)), "x is a scalar"),
    "w_scale_matrix": (lambda: dynamic(w_scale=torch.ones(6, 1)), "w_scale has shape 6x1"),
    "w_scale_double": (lambda: dynamic(w_scale=W_SCALE.double()), "w_scale has dtype Double"),
    "bias_length": (lambda: dynamic(bias=torch.ones(5)), "bias has shape 5, expected 6"),
    "bias_type": (lambda: dynamic(bias=torch.ones(6).int()), "bias has dtype Int"),
    "bits": (lambda: dynamic(bits=9), "bits=9 is outside 2..8"),
    "axes": (lambda: dynamic(axes=[0]), "axes=[0], expected [1]"),
    "activation": (lambda: dynamic(activation="softmax"), "unknown activation 'softmax'"),
    "out_dtype": (lambda: dynamic(out_dtype=torch.int8), "out_dtype is Char"),
    "scale_count": (
        lambda: linear(scale=torch.ones(4, 1)),
        "scale has 4 elements, expected one for each of the 5 rows or a single one",
    ),
    "zero_count": (lambda: linear(zero=ZERO[:3]), "zero_point has 3 elements, expected one for"),
    "zero_type": (lambda: linear(zero=ZERO.long()), "zero_point has dtype Long, expected Int"),
    "dequantize_zero": (lambda: dequantize(zero_point=ZERO[:1]), "zero_point has 1 elements but"),
    "dequantize_columns": (
        lambda: dequantize(col_scale=torch.ones(7)),
        "col_scale has shape 7, expected 8",
    ),
    "dequantize_float": (lambda: dequantize(X), "q has dtype Float, expected Char or Int"),
    "magic": (lambda: dynamic(packed=damaged(0, 0)), "does not start with the magic bytes QFXW"),
    "version": (
        lambda: dynamic(packed=damaged(4, 9)),
        "layout 1 version 9, this build reads layout 1 (K4N32) version 3",
    ),
    "layout": (lambda: dynamic(packed=damaged(8, 7)), "layout 7 version 3, this build reads"),
    "header_n": (lambda: dynamic(packed=damaged(16, 99)), "N=99 K=8 takes"),
    "header_k": (lambda: dynamic(packed=damaged(31, -1)), "its header says N=6 K=-"),
    "header_magnitude": (lambda: dynamic(packed=damaged(12, 7)), "its header is damaged"),
    "header_reserved": (
        lambda: dynamic(packed=damaged(48, 1)),
        "the reserved bytes of its header are not zero",
    ),
    "header_contents": (lambda: dynamic(packed=damaged(41, 7)), "its header is damaged"),
    "truncated": (lambda: dynamic(packed=PACKED[:-1]), "bytes, N=6 K=8 takes 2240"),
    "too_long": (
        lambda: dynamic(packed=torch.cat([PACKED, PACKED[:64]])),
        "it has 2304 bytes, N=6 K=8 takes 2240",
    ),
    "no_header": (lambda: dynamic(packed=PACKED[:9]), "it has 9 bytes, fewer than the header's"),
    "packed_matrix": (lambda: dynamic(packed=PACKED[None]), "the packed weight has shape 1x2240"),
    "packed_type": (lambda: dynamic(packed=PACKED.int()), "the packed weight has dtype Int"),
    "pack_vector": (lambda: ops.pack_weight(Q[0]), "w has shape 8, expected [N, K]"),
    "pack_float": (lambda: ops.pack_weight(X), "w has dtype Float, expected Char"),
    "pack_long_k": (
        lambda: ops.pack_weight(torch.zeros(1, 65793, dtype=torch.int8)),
        "K=65793 is above 65792",
    ),
    "rotation": (lambda: rotate(rotation=32), "rotate: rotation=32, expected 0, 16 or 64"),
    "rotation_of_k": (
        lambda: dynamic(rotation=16, factor=None),
        "int8_linear_dynamic: x has K=8 (shape 5x8), which rotation=16 does not divide",
    ),
    "factor_length": (
        lambda: ops.quantize(X, [1], 8, True, torch.ones(7)),
        "quantize: factor has shape 7 but x has K=8 (shape 5x8), expected one element for each k",
    ),
    "factor_matrix": (lambda: rotate(factor=torch.ones(1, 8)), "factor has shape 1x8 but x has K"),
    "factor_type": (lambda: rotate(factor=torch.ones(8).half()), "factor has dtype Half, expected"),
    "rotation_static": (
        lambda: ops.quantize_static(X, SCALE, None, 8, True, None, 64),
        "quantize_static: x has K=8 (shape 5x8), which rotation=64 does not divide",
    ),
    "rotate_integers": (lambda: rotate(Q), "rotate: x has dtype Char, expected Float"),
    "pack_group": (lambda: ops.pack_weight(Q, 48), "group=48, expected 0 (one scale for all of K)"),
    "header_group": (lambda: dynamic(packed=damaged(32, 3)), "its header says groups of 3"),
    "groups_k": (lambda: groups(Q), "x has K=8 (shape 5x8) but the weight was packed for K=100"),
    "groups_n": (lambda: groups(w_scale=torch.ones(7, 2)), "the weight was packed for N=6"),
    "groups_vector": (
        lambda: groups(w_scale=torch.ones(6)),
        "w_scale has shape 6, expected [N, G]",
    ),
    "groups_count": (
        lambda: groups(w_scale=torch.ones(6, 3)),
        "w_scale has shape 6x3, expected 6x2: a column for each group of 64 of the K=100",
    ),
    "groups_zero": (
        lambda: groups(w_zero=torch.ones(6, 2)),
        "w_zero has dtype Float, expected Int",
    ),
    "groups_zero_count": (
        lambda: groups(w_zero=torch.ones(6, 3, dtype=torch.int32)),
        "w_zero has shape 6x3, expected 6x2",
    ),
    "groups_without": (
        lambda: groups(Q, PACKED),
        "w_scale has shape 6x2, expected 6x1: a column for each group of 64 of the K=8",
    ),
    "groups_of_x": (
        lambda: ops.int8_linear_groups_dynamic(
            CODES.float(), GROUPED, SCALES, None, None, [1], 32, 8, True, "none", torch.float32
        ),
        "group=32, expected 0 or the 64 that the weight was packed in",
    ),
    "groups_scale": (
        lambda: ops.int8_linear_groups(
            CODES, torch.ones(5, 3), ZERO, GROUPED, SCALES, None, None, "none", torch.float32
        ),
        "scale has shape 5x3, expected one value, one for each of 5 rows, or one for each of their "
        "2 groups",
    ),
    "groups_long": (
        lambda: ops.int8_linear_groups(
            LONG,
            SCALE[:1],
            ZERO[:1],
            ops.pack_weight(LONG),
            torch.ones(1, 1),
            torch.ones(1, 1).int(),
            None,
            "none",
            torch.float32,
        ),
        "a group of 33026 with zero points is above 33025",
    ),
    "unpack_k": (lambda: ops.unpack_weight(PACKED, 6, 9), "the weight was packed for K=8"),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_sentence(name: str) -> None:
    call, phrase = CALLS[name]
    with pytest.raises(RuntimeError, match=re.escape(phrase)):
        call()


GROUPED_W = torch.ones(33, 200, dtype=torch.int8)
PACKS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Any]]] = {
    "int8": (lambda: ops.pack_weight(GROUPED_W), lambda p: ops.int8_mm(Q200, ZERO, p, 33)),
    "unpacked": (lambda: ops.pack_weight(GROUPED_W), lambda p: ops.unpack_weight(p, 33, 200)),
    "groups": (
        lambda: ops.pack_weight(GROUPED_W, 64),
        lambda p: ops.int8_linear_groups(
            Q200, SCALE, ZERO, p, torch.ones(33, 4), None, None, "none", torch.float32
        ),
    ),
    "bits": (lambda: ops.binary_pack(GROUPED_W), lambda p: ops.binary_mm(X200, p, 33)),
}
X200 = torch.ones(5, 200)
Q200 = X200.char()


@pytest.mark.parametrize("name", PACKS)
def test_any_changed_byte_of_a_packed_weight_is_noticed(name: str) -> None:
    """At its first use; each copy has an address of its own, where nothing is known yet."""
    pack, use = PACKS[name]
    good = pack()
    places = [*range(64), *range(64, len(good), 61), len(good) - 1]
    copies = good.repeat(len(places) + 1, 1)
    use(copies[-1])
    for i, place in enumerate(places):
        copies[i, place] ^= 1 << (i % 7)
        with pytest.raises(RuntimeError, match=r"not a packed weight of this build: "):
            use(copies[i])


@pytest.mark.parametrize("operand", ["x", "packed", "w_scale", "bias"])
def test_operands_on_another_device(operand: str) -> None:
    """Meta stands in for any other device."""
    call = {"x": X, "packed": PACKED, "w_scale": W_SCALE, "bias": torch.ones(6)}
    call[operand] = call[operand].to("meta")
    with pytest.raises(RuntimeError, match="operands are on cpu and meta; move all to one device"):
        dynamic(**call)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nonsense_raises_python_exceptions_only(seed: int) -> None:
    command = [sys.executable, "-m", "tests.lib.nonsense", str(seed), "600"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"seed {seed}: {result.returncode}\n{result.stderr[-2000:]}"
    returned, raised, megabytes = map(int, re.findall(r"\d+", result.stdout))
    assert returned + raised == 600 and returned and raised and megabytes < 200
