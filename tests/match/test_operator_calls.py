"""Operators of qfx that a model calls itself are rows of reports and plans, and count as int8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from qfx.pipeline import Context, run_passes
from qfx.report.float_forms import int8_modules
from qfx.report.html import page
from qfx.weights.model_restore import module_of
from tests.lib.costs import FIXED_COSTS

COARSE = qfx.Scheme(x=qfx.QSpec(bits=5), w=qfx.QSpec(bits=4))
ops = torch.ops.qfx
W = torch.randn(16, 64)
CODES, SCALE, _ = ops.quantize(W, list(Code()))
PACKED, BITS = ops.pack_weight(CODES, SCALE), ops.binary_pack(W)
ONES, ZERO = torch.ones(16, 2), torch.zeros(16, 2, dtype=torch.int32)
IN_GROUPS = ops.pack_weight(CODES, ONES, ZERO, None, 8, 32)
FIVE = ops.pack_weight(CODES // 16, ONES[:, :1], None, None, 5, 64)
ROWS, BATCH = torch.randn(4, 64), torch.randn(2, 4, 64)
END = ("none", torch.float32)


GROUPS_OF_W = qfx.Scheme(
    x=qfx.QSpec(symmetric=False), w=qfx.QSpec(bits=4, symmetric=False, group=64)
)
PACKED_GROUPS = qfx.Scheme(
    x=qfx.QSpec(bits=7, symmetric=False, group=32), w=qfx.QSpec(bits=5, group=32, packed=True)
)
GROUPS_OF_X = qfx.Scheme(x=qfx.QSpec(group=32), w=qfx.QSpec(symmetric=False), rotation=64)

STACK = torch.stack([ops.pack_weight(torch.ones(64, 64, dtype=torch.int8), torch.ones(64))] * 3)
DOWN = torch.stack([ops.pack_weight(torch.ones(64, 32, dtype=torch.int8), torch.ones(64))] * 3)
TWO, ENDS = torch.tensor([[0, 2]] * 4), torch.tensor([1, 1, 4], dtype=torch.int32)


def _linears() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8))


def _replaced(scheme: Any) -> nn.Module:
    return qfx.quantize_(_linears(), qfx.Config(scheme=scheme))


OWN: dict[str, tuple[Any, Tensor, list[tuple[str, str, str]]]] = {
    "quantize_": (_replaced("w8a8"), ROWS, [
        ("0", "4x64x16", "xa8r_ws8r_h64"), ("2", "4x16x8", "xa8r_ws8r_h64")]),
    "quantize_, groups": (_replaced(GROUPS_OF_W), ROWS, [
        ("0", "4x64x16", "xa8r_wa4g64"), ("2", "4x16x8", "xa8r_wa4g64")]),
    "quantize_, packed": (_replaced("w4a8"), ROWS, [
        ("0", "4x64x16", "xs8r_wa4p64_h64"), ("2", "4x16x8", "xs8r_wa4p64_h64")]),
    "quantize_, packed, groups of x": (_replaced(PACKED_GROUPS), ROWS, [
        ("0", "4x64x16", "xa7g32_ws5p32"), ("2", "4x16x8", "xa7g32_ws5p32")]),
    "quantize_, packed, weight only": (_replaced("w5"), ROWS, [
        ("0", "4x64x16", "wa5p64"), ("2", "4x16x8", "wa5p64")]),
    "quantize_, groups of x": (_replaced(GROUPS_OF_X), ROWS, [
        ("0", "4x64x16", "xs8g32_wa8r_h64"), ("2", "4x16x8", "xs8g32_wa8r_h64")]),
    "rewritten, groups": (
        qfx.rewrite(qfx.trace(nn.Linear(128, 16), ROWS.repeat(1, 2)),
                    qfx.Config(scheme="w8a8-groups", minimum_gain=0))[0],
        ROWS.repeat(1, 2), [("", "4x128x16", "xs8g64_ws8g64_h64")]),
    "quantize_, weight only": (_replaced("w8"), ROWS, [
        ("0", "4x64x16", "ws8r"), ("2", "4x16x8", "ws8r")]),
    "LSQLinear": (qfx.prepare_qat(_linears(), config=qfx.Config(scheme=COARSE)), ROWS, [
        ("0", "4x64x16", "xs5r_ws4r"), ("2", "4x16x8", "xs5r_ws4r")]),
    "BinaryLinear": (qfx.prepare_binary(_linears(), ROWS), ROWS, [
        ("0", "4x64x16", "binary"), ("2", "4x16x8", "binary")]),
    "functional": (lambda x: qfx.nn.functional.linear(x, W), ROWS, [("", "4x64x16", "xs8r_ws8r")]),
    "dynamic": (
        lambda x: ops.linear_dynamic(x, PACKED, list(Layout(16)), None, list(Code(7, 0)), *END),
        ROWS, [("", "4x64x16", "xa7r_ws8r")]),
    "static": (
        lambda x: ops.linear(*ops.quantize(x, list(Code()), SCALE[:1, 0]), PACKED,
                             list(Layout(16)), None, *END),
        ROWS, [("", "4x64x16", "xs8T_ws8r")]),
    "stochastic, groups, zero points": (
        lambda x: ops.linear(*ops.quantize(x, list(Code()), seed=torch.tensor([1])), IN_GROUPS,
                             list(Layout(16, 8, 32, 32, 1)), None, *END),
        ROWS, [("", "4x64x16", "xs8r_wa8g32")]),
    "experts": (
        lambda x: ops.experts(x, TWO, x[:, :2], STACK, list(Layout(64)), None, DOWN,
                              list(Layout(64)), None, list(Code(8, 0)), list(Code(8, 0)),
                              "silu", "halves", torch.float32),
        ROWS, [("", "8x64x96", "xa8r_ws8r")]),
    "a product of experts": (
        lambda x: ops.linear_experts(x, STACK, list(Layout(64)), ENDS, None, list(Code(8, 0)),
                                     *END),
        ROWS, [("", "4x64x64", "xa8r_ws8r")]),
    "float, five bits": (
        lambda x: ops.linear_float(x, FIVE, list(Layout(16, 5, 64, 64)), None, *END),
        ROWS, [("", "4x64x16", "ws5p64")]),
    "codes": (
        lambda x: ops.int8_mm(x.to(torch.int8), torch.zeros(4, dtype=torch.int32), PACKED, 16),
        ROWS, [("", "4x64x16", "x?_ws8r")]),
    "bmm": (lambda x: ops.int8_bmm_dynamic(x, x, [1], 8, True, 6, torch.float32), BATCH,
            [("", "2*4x64x4", "xs8r_ws6r")]),
    "attention": (lambda x: ops.int8_attention(x, x, x, None, 0.1, False, torch.float32), BATCH,
                  [("", "2*4x64x4", "xs8r_ws8r_h64")]),
    "binary_mm": (lambda x: ops.binary_mm(x, BITS, 16), ROWS, [("", "4x64x16", "binary")]),
    "rewritten": (qfx.rewrite(qfx.trace(nn.Linear(64, 16), ROWS), qfx.Config(minimum_gain=0))[0],
                  ROWS, [("", "4x64x16", "xa8r_ws8r_h64")]),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_int8_operators_of_the_model_itself(name: str) -> None:
    model, x, expected = OWN[name]
    report = qfx.explain(model, x)
    assert [(row.module, row.shape, row.scheme) for row in report.rows] == expected
    assert report.quantized == report.total == len(expected)
    modules = bool(int8_modules(module_of(model)))
    said = "module, qfx.nn." if modules else "operator of the model itself"
    assert all(r.measured is modules and r.kernel and said in r.reason for r in report.rows)
    assert f"{len(expected)} of {len(expected)} matmuls in int8" in page(report)


def test_a_plan_counts_int8_operators_of_the_model_itself() -> None:
    mixed = nn.Sequential(_replaced("w8a8"), nn.Linear(8, 8))
    with torch.no_grad():
        context = Context(qfx.Config(), FIXED_COSTS)
        plan = run_passes(qfx.trace(mixed, ROWS), context, "decide").plan
    assert (plan.quantized, plan.total) == (2, 3) and "xa8r_ws8r_h64" in str(plan)


def test_a_float_operator_of_qfx_is_a_row() -> None:
    def decode(x: Tensor) -> Tensor:
        return ops.attention_decode(x[:, :1], x, x, None, 0.1, False, torch.float32)

    (row,) = qfx.explain(decode, BATCH).rows
    assert (row.shape, row.scheme) == ("2*1x64x4", "float")
    assert row.reason == "a float operator of the model itself"


def test_patterns_that_cannot_change_an_operator_are_answered() -> None:
    report = qfx.explain(_replaced("w8a8"), ROWS, options={"skip": ["0"]})
    assert report.rows[0].reason == (
        "an int8 module, qfx.nn.Linear, though skipped by the pattern '0'"
    )
    assert report.quantized == 2
