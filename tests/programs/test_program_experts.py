"""Blocks of experts in a program: the bits of the operator, and routing that PyTorch does not
run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from tests.conftest import on_isa, on_threads
from tests.ops.test_op_experts import Block, Stack, blocks
from tests.programs.traced import aten, built, same_bits

ops = torch.ops.qfx


def _in_float32(block: Block) -> Block:
    """Returns the block with biases as a program reads them."""

    def wide(stack: Stack) -> Stack:
        return stack if stack.bias is None else stack._replace(bias=stack.bias.float())

    return block._replace(up=wide(block.up), down=wide(block.down))


def _call(block: Block, x: Any, expert: Any, routing: Any) -> Any:
    end = (block.activation, block.gate, block.out_dtype, block.limit, block.shift)
    every = (*block.up, *block.down, block.code, block.inner, *end)
    return ops.experts.default(x, expert, routing, *every)


def _alone(block: Block) -> Any:
    return built(lambda x, expert, routing: _call(block, x, expert, routing), block[:3])


@settings(max_examples=max(settings().max_examples // 2, 10))
@given(blocks(), st.sampled_from([1, 2]))
def test_they_give_the_bits_of_the_operator(drawn: Block, threads: int) -> None:
    block = _in_float32(drawn)
    runner = _alone(block)
    assert runner.outside == []
    for isa in _C.isas():
        with on_isa(isa), on_threads(threads):
            assert same_bits(runner(*block[:3])[0], block.run()), isa


def _some(draw: st.DrawFn) -> Block:
    return _in_float32(draw(blocks().filter(lambda b: b.expert.numel() > 0)))


@given(st.data())
def test_an_expert_below_0_is_refused(data: st.DataObject) -> None:
    block = _some(data.draw)
    runner = _alone(block)
    expert = block.expert.clone()
    expert.view(-1)[-1] = -1
    with pytest.raises(IndexError, match="a slot has expert -1"):
        runner(block.x, expert, block.routing)


def _chosen(logits: Any, k: int) -> tuple[Any, Any]:
    """Returns the experts of each token and their weights, by a softmax of logits."""
    p = aten.softmax.int(logits, -1)
    top = aten.topk.default(p, k)
    return top[1], aten.div.Tensor(top[0], aten.sum.dim_IntList(top[0], [-1], True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_router_of_16_bits_reads_floats(dtype: torch.dtype) -> None:
    """Its products are those of float32: neither what it reads nor what it gives is rounded."""
    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=g) for shape in ((7, 96), (20, 96), (20,)))
    w, b = w.to(dtype), b.to(dtype)

    def f(y: Any) -> Any:
        if dtype == torch.float32:
            return aten.linear.default(y, w, b)
        return aten.to.dtype(aten.linear.default(aten.to.dtype(y, dtype), w, b), torch.float32)

    runner = built(f, (x,))
    assert runner.outside == []
    expected = x.double() @ w.double().T + b.double()
    size = x.double().abs() @ w.double().abs().T + b.double().abs()
    assert bool(((runner(x)[0] - expected).abs() <= 99 * 2.0**-24 * size).all())


@pytest.mark.parametrize("late", ["linear", "mask", "negated mask"])
def test_a_value_that_is_written_between_its_conversion_and_its_reader(late: str) -> None:
    x, w = torch.randn(3, 8), torch.randn(4, 8).bfloat16()

    def f(y: Any) -> Any:
        z = aten.relu.default(y)
        kept = aten.to.dtype(z, torch.bfloat16 if late == "linear" else torch.bool)
        aten.add_.Tensor(z, 1.0)
        if late == "linear":
            return aten.to.dtype(aten.linear.default(kept, w), torch.float32)
        mask = aten.bitwise_not.default(kept) if late == "negated mask" else kept
        return aten.masked_fill.Scalar(y, mask, 7.0)

    assert same_bits(built(f, (x,))(x)[0], f(x))


def test_an_input_of_16_bits_is_pytorchs() -> None:
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    runner = built(lambda y: aten.linear.default(y, w), (x,))
    assert runner.outside == ["aten.linear.default"]
    assert same_bits(runner(x)[0], aten.linear.default(x, w))


def test_a_float_linear_with_many_outputs_is_pytorchs() -> None:
    x, w = torch.randn(3, 8), torch.randn(513, 8)
    runner = built(lambda y: aten.linear.default(y, w), (x,))
    assert runner.outside == ["aten.linear.default"]
    assert same_bits(runner(x)[0], aten.linear.default(x, w))


@given(st.data())
def test_a_whole_mixture_is_one_program(data: st.DataObject) -> None:
    """The choice is PyTorch's: its logits are exact sums, and no two are equal."""
    block = _some(data.draw)
    experts, k = block.up.packed.shape[0], min(2, block.up.packed.shape[0])
    order = torch.stack([torch.randperm(experts) for _ in range(len(block.x))]).float()

    def f(x: Any, logits: Any) -> Any:
        expert, routing = _chosen(logits, k)
        return _call(block, x, expert, routing)

    runner = built(f, (block.x, order))
    assert runner.outside == []
    expert, routing = _chosen(order, k)
    expected: Tensor = block._replace(expert=expert, routing=routing).run()
    found = runner(block.x, order)[0]
    assert bool(((found - expected).abs() <= 1e-5 * expected.abs().amax()).all())
