"""FlopCounterMode counts our products as it counts those that they replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import qfx
from qfx.ops.code import Code
from qfx.ops.experts import stack_packed
from qfx.ops.layout import Layout
from qfx.ops.legacy_operators import NAMES
from tests.lib.pairs import every
from tests.lib.several import Weights

M, K, N = 5, 64, 48
INSIDE = ("value_linear", "weight_only_linear")  # called by operators that are counted
ops: Any = torch.ops.qfx


def attention(*inputs: Any) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # the others are not counted on CPUs
        F.scaled_dot_product_attention(*inputs)


def counted(function: Any, *inputs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "scheme, trains",
    every(["w8a8", "w8a8-groups", "w8a8-asymmetric", "w4a8", "w8", "w4"], [False, True]),
)
def test_modules_are_counted_as_those_that_they_replace(scheme: str, trains: bool) -> None:
    net = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K))
    x = torch.randn(2, M, K, requires_grad=trains)

    def step(model: nn.Module) -> None:
        y = model(x)
        if trains:
            y.sum().backward()

    expected = 2 * (2 * M * K * N) * 2 * (2 if trains else 1)  # and to x, but for no weight
    model = qfx.quantize_(net, qfx.Config(scheme=scheme))
    assert counted(step, model) == expected
    if not trains:
        assert counted(step, nn.Sequential(nn.Linear(K, N), nn.Linear(N, K))) == expected


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-groups", "w4a8"])
def test_int8_gradients_below_frozen_weights_are_counted(scheme: str) -> None:
    """At the first step, which turns the weight, and at later ones."""
    net = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K))
    model = qfx.quantize_(net, qfx.Config(scheme=scheme, backward="int8"))
    x = torch.randn(2, M, K, requires_grad=True)
    for _ in range(2):
        assert counted(lambda: model(x).sum().backward()) == 2 * 2 * (2 * 2 * M * K * N)


def test_a_compiled_model_is_counted() -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    x = torch.randn(M, 256)
    rewritten, plan = qfx.rewrite(qfx.trace(net, x), qfx.Config(minimum_gain=0))
    assert "2 of 2 matmuls in int8" in str(plan)
    assert counted(rewritten, x) == counted(net, x) == 2 * 2 * M * 256 * 256


def test_several_linears_and_attentions_are_counted() -> None:
    a, b = torch.randn(2, M, K), torch.randn(2, N, K)
    bits = ((1,), 8, True, 8, torch.float32)
    assert counted(ops.int8_bmm_dynamic, a, b, *bits) == counted(torch.bmm, a, b.mT)
    q, k = torch.randn(1, 4, M, 64), torch.randn(1, 4, 9, 64)
    given = (None, 0.125, False, torch.float32)
    expected = counted(attention, q, k, k)
    assert counted(ops.int8_attention, q, k, k, *given) == expected
    assert counted(ops.attention_decode, q, k, k, *given) == expected
    past, new = k[:, :, :6], k[:, :, 6:]
    q = torch.randn(1, 4, 3, 64)
    expected = counted(attention, q, k, k)
    assert counted(ops.attention_append, q, past, new, past, new, *given) == expected


def test_experts_are_counted() -> None:
    """Each slot of each token is two products, the first with twice the columns for a gate."""
    for gate, hidden in (("halves", 32), ("none", 64)):
        of = [Weights(0, k) for k in (K, hidden)]
        stacks = [
            (stack_packed([one.int8(n).packed for _ in range(3)], 3), [*Layout(n)], None)
            for one, n in zip(of, (64, N), strict=True)
        ]
        expert = torch.tensor([[0, 1], [2, 0], [1, 2]])
        call = (torch.randn(3, K), expert, torch.rand(3, 2), *stacks[0], *stacks[1])
        code = [*Code()]
        end = (code, code, "silu", gate, torch.float32)
        assert counted(ops.experts, *call, *end) == 2 * 6 * (64 * K + hidden * N)


def test_gradients_of_experts_are_counted() -> None:
    """To x and the weights one product each. A block computes its first product again, for routing
    weights also the second; to x it multiplies back by both."""
    of = [Weights(0, k) for k in (K, 32)]
    up, down = (
        (stack_packed([one.int8(n).packed for _ in range(3)], 3), [*Layout(n)], None)
        for one, n in zip(of, (64, N), strict=True)
    )
    x, routing = torch.randn(3, K, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    expert, code = torch.tensor([[0, 1], [2, 0], [1, 2]]), [*Code()]
    end = (code, code, "silu", "halves", torch.float32)
    first, last = 2 * 6 * 64 * K, 2 * 6 * N * 32
    for leaf, expected in ((x, 2 * first + last), (routing, first + last)):
        y = ops.experts(
            *(t if t is leaf else t.detach() for t in (x, expert, routing)), *up, *down, *end
        )
        assert counted(lambda y=y: y.sum().backward()) == expected
    offsets = torch.tensor([1, 1, 3], dtype=torch.int32)
    y = ops.linear_experts(x, *up[:2], offsets, None, code, "none", torch.float32)
    assert counted(lambda: y.sum().backward()) == 2 * 3 * 64 * K
    w, codes = torch.randn(3, 64, K, requires_grad=True), [*ops.quantize(x.detach(), code)]
    how = (None, up[1], offsets, [*code, 8, 0], None, torch.float32)
    y = ops.linear_experts_ste(x, w, codes, *how)
    assert counted(lambda: y.sum().backward()) == 2 * (2 * 3 * 64 * K)


def test_recurrent_products_are_counted() -> None:
    """One product a step. The gradient computes it again and multiplies back."""
    for op, gates in ((ops.lstm, 4), (ops.gru, 3)):
        w, layout, *_ = Weights(0, K).int8(gates * K)
        x = torch.randn(5, M, gates * K, requires_grad=True)
        states = [torch.randn(M, K) for _ in range(gates - 2)]
        call = (w, layout, None, *states, [*Code()], False, torch.float32)
        assert counted(op, x.detach(), *call) == 2 * 5 * M * gates * K * K
        y = op(x, *call)[0].sum()
        assert counted(lambda y=y: y.backward()) == 2 * (2 * 5 * M * gates * K * K)


def test_each_operator_that_multiplies_has_a_formula() -> None:
    names = torch._C._dispatch_get_all_op_names()
    ours = {n.removeprefix("qfx::").split(".")[0] for n in names if n.startswith("qfx::")}
    words = ("linear", "mm", "attention", "experts", "lstm", "gru")
    products = {n for n in ours if any(w in n for w in words)} - {*NAMES, *INSIDE}
    lacking = {n for n in products if getattr(ops, n) not in flop_registry}
    assert len(products) > 12 and lacking == set()
