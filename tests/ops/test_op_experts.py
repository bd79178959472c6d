"""experts and linear_experts: a token's bits are those of its experts, one by one."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.ops.code import Code
from qfx.ops.experts import stack_packed
from qfx.ops.layout import Layout
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib.several import Weights

ops = torch.ops.qfx
F32 = torch.float32
GATED = {"none": 1, "halves": 2, "interleaved": 2}


class Stack(NamedTuple):
    """Packed weights of experts, [E, bytes], their layout, and their biases [E, N]."""

    packed: Tensor
    layout: list[int]
    bias: Tensor | None

    def of(self, e: int) -> tuple[Any, ...]:
        """Returns the weight, layout and bias of one expert."""
        return self.packed[e], self.layout, None if self.bias is None else self.bias[e]


class Block(NamedTuple):
    """Arguments of `experts`, and its gate."""

    x: Tensor
    expert: Tensor
    routing: Tensor
    up: Stack
    down: Stack
    code: list[int]
    inner: list[int]
    activation: str = "silu"
    gate: str = "halves"
    limit: float = 0.0
    shift: float = 0.0
    out_dtype: torch.dtype = F32

    def run(self) -> Tensor:
        end = (self.activation, self.gate, self.out_dtype, self.limit, self.shift)
        every = (*self.up, *self.down, self.code, self.inner, *end)
        y: Tensor = ops.experts.default(self.x, self.expert, self.routing, *every)
        return y

    def of_tokens(self, tokens: Tensor) -> Block:
        each = (t[tokens] for t in (self.x, self.expert, self.routing))
        return Block(*each, *self[3:])


def stack_of(of: Weights, experts: int, n: int, form: str, bias: bool) -> Stack:
    bits, group = {"int8": (8, 0), "groups": (8, 64), "4 bits": (4, 32)}[form]

    def one() -> Tensor:
        if form == "int8":
            return of.int8(n).packed
        return of.in_groups(n, group, "none" if form == "groups" else "minimum", bits).packed

    packed = stack_packed((one() for _ in range(experts)), experts)
    layout = Layout(n, bits, group, group, int(form == "4 bits"))
    biases = torch.randn(experts, n, generator=of.g).bfloat16() if bias else None
    return Stack(packed, list(layout), biases)


@st.composite
def blocks(draw: Any) -> Block:
    """Draws sizes, forms of weights, gates, and tokens of which some go to experts that do not
    exist."""
    k, hidden, n = (draw(st.sampled_from(sizes)) for sizes in ([20, 64], [64, 96], [1, 33, 64]))
    experts, slots = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    tokens = draw(st.sampled_from([0, 1, 2, 9, 40, 300]))
    form, gate = (
        draw(st.sampled_from(["int8", "groups", "4 bits"])),
        draw(st.sampled_from([*GATED])),
    )
    of, bias = Weights(draw(st.integers(0, 99)), k), draw(st.booleans())
    up = stack_of(of, experts, GATED[gate] * hidden, form, bias)
    down = stack_of(Weights(7, hidden), experts, n, form, bias)
    symmetric, rotation = draw(st.integers(0, 1)), draw(st.sampled_from([0, 64]))
    code = Code(8, symmetric, rotation=rotation if k % 64 == 0 else 0)
    inner = code._replace(rotation=rotation if hidden % 64 == 0 else 0)
    expert = torch.randint(experts + 1, (tokens, slots), generator=of.g)
    routing = torch.rand(tokens, slots, generator=of.g)
    clip = draw(st.sampled_from([(0.0, 0.0), (7.0, 1.0)]))
    kind = draw(st.sampled_from(["silu", "quick_gelu", "relu", "gelu_tanh"]))
    x = torch.randn(tokens, k, generator=of.g)
    return Block(x, expert, routing, up, down, list(code), list(inner), kind, gate, *clip)


def _one_by_one(block: Block) -> Tensor:
    """Computes each token and slot with operators for one weight."""
    size = block.up.layout[0] // GATED[block.gate]
    y = torch.zeros(block.x.shape[0], block.down.layout[0])
    most = block.limit or torch.inf
    for t, (x, slots) in enumerate(zip(block.x, block.expert.tolist(), strict=True)):
        for s, e in enumerate(slots):
            if e >= block.up.packed.shape[0]:
                continue
            u = ops.linear_dynamic.default(x[None], *block.up.of(e), block.code, "none", F32)
            g, v = (u, None) if block.gate == "none" else _parts(u, block.gate, size)
            h = _activated(g.clamp(max=most), block.activation)
            h = h if v is None else h * (v.clamp(-most, most) + block.shift)
            out = ops.linear_dynamic.default(h, *block.down.of(e), block.inner, "none", F32)
            y[t] += block.routing[t, s] * out[0]
    return y


def _parts(u: Tensor, gate: str, size: int) -> tuple[Tensor, Tensor]:
    return (u[:, :size], u[:, size:]) if gate == "halves" else (u[:, ::2], u[:, 1::2])


def _activated(g: Tensor, activation: str) -> Tensor:
    """Applies an activation by the epilogue of the kernels, with the floats as scales of ones."""
    ones = torch.ones(g.numel(), 1, dtype=torch.int32)
    scale = g.reshape(-1, 1).contiguous()
    y: Tensor = ops.dequantize.default(ones, scale, None, None, None, activation, F32)
    return y.reshape(g.shape)


@given(block=blocks())
def test_a_block_has_the_bits_of_its_experts_one_by_one(block: Block) -> None:
    """On every instruction set and with one thread or two."""
    expected = _one_by_one(block)
    for isa in _C.isas():
        for threads in (1, 2):
            with on_isa(isa), on_threads(threads):
                assert same_bits(block.run(), expected), (isa, threads)


@given(block=blocks(), data=st.data())
def test_a_token_has_the_same_bits_in_any_batch(block: Block, data: st.DataObject) -> None:
    """Whatever the order of tokens is, and whichever of them there are."""
    count = block.x.shape[0]
    order = torch.tensor(data.draw(st.permutations(range(count))), dtype=torch.int64)
    some = order[: data.draw(st.integers(0, count))]
    assert same_bits(block.of_tokens(some).run(), block.run()[some])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_in_and_out(dtype: torch.dtype) -> None:
    """What comes in is widened, what comes out is rounded once."""
    block = _block()
    halves = block._replace(x=block.x.to(dtype), routing=block.routing.to(dtype), out_dtype=dtype)
    wide = block._replace(x=halves.x.float(), routing=halves.routing.float())
    assert same_bits(halves.run(), wide.run().to(dtype))


def test_a_token_that_is_nan_leaves_the_others() -> None:
    block = _block()
    expected = block.run()
    block.x[2, 3] = torch.nan
    found = block.run()
    assert found[2].isnan().all()
    assert same_bits(found[[0, 1, 3]], expected[[0, 1, 3]])


def test_more_products_than_wait_at_a_time() -> None:
    """256 MB of products of tokens wait for the sums of their slots; the rest come later."""
    of = Weights(0, 64)
    up, down = stack_of(of, 2, 128, "int8", False), stack_of(of, 2, 1 << 15, "int8", False)
    tokens = 1100
    expert = torch.randint(2, (tokens, 2), generator=of.g)
    routing = torch.rand(tokens, 2, generator=of.g)
    x, code = torch.randn(tokens, 64, generator=of.g), list(Code())
    block = Block(x, expert, routing, up, down, code, code)
    assert same_bits(block.run()[-60:], block.of_tokens(torch.arange(tokens - 60, tokens)).run())


def test_strided_operands() -> None:
    block = _block()
    twice = torch.cat([block.up.packed] * 2, 1)
    wide = block._replace(
        x=block.x.t().contiguous().t(),
        expert=torch.stack([block.expert, block.expert], 2)[..., 0],
        routing=torch.stack([block.routing, block.routing], 2)[..., 1],
        up=block.up._replace(packed=twice[:, : block.up.packed.shape[1]]),
    )
    assert same_bits(wide.run(), block.run())


def _block(**other: Any) -> Block:
    of = Weights(0, 64)
    up, down = stack_of(of, 3, 64, "int8", True), stack_of(Weights(1, 32), 3, 40, "int8", True)
    expert = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 3]])
    routing = torch.rand(4, 2, generator=of.g)
    x, code = torch.randn(4, 64, generator=of.g), list(Code())
    return Block(x, expert, routing, up, down, code, code)._replace(**other)


SMALL = _block()


def _first_two(stack: Stack) -> Stack:
    assert stack.bias is not None
    return stack._replace(packed=stack.packed[:2], bias=stack.bias[:2])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"x": SMALL.x[0]}, "x has shape 64, expected two dimensions"),
        ({"x": SMALL.x[:, :32]}, "x has K=32 but the weight was packed for K=64"),
        ({"expert": SMALL.expert - 1}, "expert has -1, expected numbers from 0 on"),
        ({"expert": SMALL.expert.int()}, "expert has dtype Int, expected Long"),
        ({"expert": SMALL.expert[:3]}, "expert has shape 3x2 and routing 4x2, expected a row for"),
        ({"routing": SMALL.routing[:, :1]}, "expert has shape 4x2 and routing 4x1"),
        ({"gate": "thirds"}, "gate is 'thirds', expected none, halves or interleaved"),
        ({"gate": "none"}, "x has K=64 but the weight was packed for K=32"),
        ({"activation": "swish"}, "swish"),
        ({"limit": -1.0}, "limit=-1, expected a positive number, or 0 for none"),
        ({"down": _first_two(SMALL.down)._replace(bias=None)}, "up has 3 experts and down 2"),
        ({"down": SMALL.down._replace(bias=_first_two(SMALL.down).bias)}, "a bias has shape 2x40"),
        ({"up": SMALL.up._replace(packed=SMALL.up.packed[0])}, "expected a packed weight in each"),
        ({"up": SMALL.up._replace(packed=SMALL.up.packed[:, 1:])}, "not a packed weight"),
        ({"inner": list(Code(per_tensor=1))}, "down_code has one scale for all rows"),
        ({"inner": list(Code(rotation=32))}, "down_code has rotation=32, expected 0, 16 or 64"),
        ({"code": list(Code(group=32))}, "group=32, but the weight was packed in one group"),
    ],
)  # fmt: skip
def test_a_block_that_is_refused(other: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        _block(**other).run()
    assert "experts: " in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([1, 0, 4], "the rows of expert 1 end at 0, expected between 1, where they begin, and 4"),
        ([1, 2, 5], "the rows of expert 2 end at 5, expected between 2"),
        ([1, 2], "offsets has shape 2, expected 3, where the rows of each expert end"),
    ],
)
def test_offsets_that_are_refused(ends: list[int], said: str) -> None:
    offsets = torch.tensor(ends, dtype=torch.int32)
    operands = (SMALL.x, SMALL.up.packed, SMALL.up.layout, offsets, None, SMALL.code)
    with pytest.raises(RuntimeError, match=said):
        ops.linear_experts.default(*operands, "none", F32)
