"""Gradients of experts: those of linears one by one, and of a straight-through oracle in float64.
(X3) (X4)"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qfx.graph.activations import ACTIVATIONS
from qfx.ops import REFERENCES
from qfx.ops.code import Code
from qfx.ops.experts import gated
from qfx.ops.experts_backward import gate_gradient
from qfx.ops.layout import Layout
from qfx.ops.weight_values import weight_values
from tests.conftest import on_threads, same_bits
from tests.lib.live_bytes import most_bytes
from tests.lib.several import Weights
from tests.ops.test_op_experts import GATED, Block, Stack, blocks, stack_of
from tests.ops.test_op_rotate import matrix_of

ops = torch.ops.qfx
F32 = torch.float32
HALF_ULP = 2.0**-24


class Sorted(NamedTuple):
    """Rows sorted by expert, weights that train [E, N, K] or are packed, and a gradient of y."""

    x: Tensor
    w: Tensor | None
    stack: Stack
    ends: list[int]
    code: list[int]
    seed: Tensor | None
    grad: Tensor

    @property
    def offsets(self) -> Tensor:
        return torch.tensor(self.ends, dtype=torch.int32)

    @property
    def codes(self) -> list[Tensor]:
        return list(ops.quantize.default(self.x.detach(), self.code))

    def run(self) -> Tensor:
        packed = self.stack.packed if self.w is None else None
        weights = (self.w, self.codes, packed, self.stack.layout, self.offsets)
        how = ([*self.code, 8, 0], self.seed, self.grad.dtype)
        y: Tensor = ops.linear_experts_ste.default(self.x, *weights, *how)
        return y

    def frozen(self) -> Tensor:
        """Runs linear_experts, which quantizes x and has biases."""
        how = (self.offsets, self.stack.bias, self.code, "none", self.grad.dtype)
        y: Tensor = ops.linear_experts.default(self.x, *self.stack[:2], *how)
        return y

    def one_by_one(self, with_bias: bool) -> tuple[Tensor, list[Tensor | None]]:
        """Returns y, and the gradients of x, w and the biases, by linear_ste for each expert."""
        y, dx = torch.zeros_like(self.grad), torch.zeros_like(self.x)
        dw = None if self.w is None else torch.zeros_like(self.w)
        db = None if self.stack.bias is None else torch.zeros_like(self.stack.bias)
        for e, (begin, end) in enumerate(pairwise((0, *self.ends))):
            x = self.x[begin:end].detach().requires_grad_()
            w = None if self.w is None else self.w[e].detach().requires_grad_()
            packed, layout, bias = self.stack.of(e)
            bias = bias.detach().requires_grad_() if bias is not None and with_bias else None
            if w is not None:
                of_w = Code(rotation=self.code[4])
                packed = ops.pack_weight.default(*ops.quantize.default(w.detach(), of_w)[:2])
            triple = [part[begin:end] for part in self.codes]
            seed = None if self.seed is None else self.seed + 2 * e
            how = (triple, packed, layout, [*self.code, 8, 0], seed, self.grad.dtype)
            part = ops.linear_ste.default(x, w, bias, None, None, *how)
            y[begin:end] = part.detach()
            leaves = [t for t in (x, w, bias) if t is not None]
            found = iter(torch.autograd.grad(part, leaves, self.grad[begin:end]))
            dx[begin:end] = next(found)
            if dw is not None:
                dw[e] = next(found)
            if db is not None and bias is not None:
                db[e] = next(found)
        return y, [dx, dw, db]


@st.composite
def products(draw: Any) -> Sorted:
    """Draws experts of which some have no rows, and rows of which some have no expert."""
    k, n = draw(st.sampled_from([20, 64, 128])), draw(st.sampled_from([1, 33, 64]))
    form = draw(st.sampled_from(["trains", "trains in int8", "int8", "groups", "4 bits"]))
    experts, of = draw(st.integers(1, 5)), Weights(draw(st.integers(0, 99)), k)
    ends = sorted(draw(st.integers(0, 12)) for _ in range(experts))
    rows = ends[-1] + draw(st.integers(0, 2))
    dtype = draw(st.sampled_from([F32, torch.bfloat16]))
    stack = stack_of(of, experts, n, form if "trains" not in form else "int8", draw(st.booleans()))
    w, seed = None, None
    if "trains" in form:
        w = torch.randn(experts, n, k, generator=of.g).to(dtype)
        w = w if draw(st.booleans()) else w.mT.contiguous().mT
        seed = torch.tensor([draw(st.integers(0, 99))]) if "int8" in form else None
    rotation = draw(st.sampled_from([0, 64])) if k % 64 == 0 else 0
    code = list(Code(8, draw(st.integers(0, 1)), rotation=rotation))
    x, grad = (torch.randn(rows, size, generator=of.g).to(dtype) for size in (k, n))
    return Sorted(x, w, stack, ends, code, seed, grad)


@given(p=products())
def test_a_product_has_the_gradients_of_linears_one_by_one(p: Sorted) -> None:
    """Bit for bit, those of the int8 backward too."""
    x, w = p.x.requires_grad_(), None if p.w is None else p.w.requires_grad_()
    assert_equal(p.run(), [x, w], p.one_by_one(False), p.grad)
    if p.w is None:
        bias = None if p.stack.bias is None else p.stack.bias.requires_grad_()
        assert_equal(p.frozen(), [x, None, bias], p.one_by_one(True), p.grad)


def assert_equal(
    y: Tensor,
    leaves: list[Tensor | None],
    expected: tuple[Tensor, list[Tensor | None]],
    grad: Tensor,
) -> None:
    assert same_bits(y.detach(), expected[0])
    of_leaves = zip(leaves, expected[1], strict=False)
    pairs = [(t, d) for t, d in of_leaves if t is not None]
    found = torch.autograd.grad(y, [t for t, _ in pairs], grad)
    for got, (leaf, wanted) in zip(found, pairs, strict=True):
        assert wanted is not None and same_bits(got, wanted)
        assert got.dtype == leaf.dtype and got.stride() == leaf.stride()


@given(p=products())
def test_dx_is_the_gradient_times_the_dequantized_weight(p: Sorted) -> None:
    """Within one float32 matmul, the roundings of (R1), and those of 16 bits: of the weight, the
    product and what is rotated, each 2^-8."""
    p = p._replace(w=None, seed=None)
    x = p.x.requires_grad_()
    (dx,) = torch.autograd.grad(p.frozen(), x, p.grad)
    k, n = p.x.shape[1], p.grad.shape[1]
    r, ulps = matrix_of(p.code[4], k), (n + 18) * HALF_ULP
    ulps += 0 if dx.dtype == F32 else 4 * 2.0**-8
    for e, (begin, end) in enumerate(pairwise((0, *p.ends))):
        w, g = weight_values(*p.stack.of(e)[:2], k, F32).double(), p.grad[begin:end].double()
        bound = ulps * (g.abs() @ w.abs() @ r.abs())
        assert ((dx[begin:end].double() - g @ w @ r).abs() <= bound).all()
    assert not dx[p.ends[-1] :].any()


# --- whole blocks ---

LEAVES = ("x", "routing", "up_bias", "down_bias")


def leaves_of(block: Block) -> dict[str, Tensor]:
    found = (block.x, block.routing, block.up.bias, block.down.bias)
    pairs = zip(LEAVES, found, strict=True)
    return {name: t.detach().clone().requires_grad_() for name, t in pairs if t is not None}


def with_leaves(block: Block, leaves: dict[str, Tensor]) -> Block:
    up, down = (
        stack._replace(bias=leaves.get(name))
        for name, stack in (("up_bias", block.up), ("down_bias", block.down))
    )
    return block._replace(x=leaves["x"], routing=leaves["routing"], up=up, down=down)


def gradients_of(block: Block, grad: Tensor) -> dict[str, Tensor]:
    leaves = leaves_of(block)
    y = with_leaves(block, leaves).run()
    return dict(zip(leaves, torch.autograd.grad(y, [*leaves.values()], grad), strict=True))


def oracle(block: Block, grad: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients in float64 with the values of the forward, and the sums of the absolute terms
    behind them. The derivative of an activation function may be wrong by some units of max(1, |v|),
    which its terms contain."""
    leaves = {n: t.detach().double().requires_grad_() for n, t in leaves_of(block).items()}
    sizes = {n: torch.zeros_like(t) for n, t in leaves.items()}
    y = 0 * leaves["x"].sum(1, keepdim=True).expand(-1, block.down.layout[0])
    codes, g = ops.quantize.default(block.x, block.code), grad.double()
    k, hidden = block.x.shape[1], block.up.layout[0] // GATED[block.gate]
    r, r_inner = (matrix_of(code[4], size) for code, size in
                  ((block.code, k), (block.inner, hidden)))  # fmt: skip
    how = (block.activation, block.gate, block.limit, block.shift)
    for t, slots in enumerate(block.expert.tolist()):
        for s, e in enumerate(slots):
            if e >= len(block.up.packed):
                continue
            w1 = weight_values(*block.up.of(e)[:2], k, F32).double()
            w2 = weight_values(*block.down.of(e)[:2], hidden, F32).double()
            of_t = [part[t, None] for part in codes]
            u_seen = ops.linear.default(*of_t, *block.up.of(e), "none", F32)
            u = _as_seen(leaves["x"][t, None] @ r.t() @ w1.t(), leaves.get("up_bias"), e, u_seen)
            h = gated(u, *how)
            seen = _one_slot(block, t, s)
            y_ts = _as_seen(h @ r_inner.t() @ w2.t(), leaves.get("down_bias"), e, seen)
            y = y.index_add(0, torch.tensor([t]), leaves["routing"][t, s] * y_ts)
            size = (leaves["routing"][t, s] * g[t]).detach().abs()
            du = _gate_terms(u.detach(), size[None] @ w2.abs() @ r_inner.abs(), block)
            sizes["x"][t] += (du @ w1.abs() @ r.abs())[0]
            sizes["routing"][t, s] += (g[t] * y_ts[0].detach()).abs().sum()
            for name, terms in (("up_bias", du[0]), ("down_bias", size)):
                if name in sizes:
                    sizes[name][e] += terms
    found = torch.autograd.grad(y, [*leaves.values()], g, allow_unused=True)
    zeros = (torch.zeros_like(t) for t in leaves.values())
    got = (z if d is None else d for d, z in zip(found, zeros, strict=True))
    return dict(zip(leaves, got, strict=True)), sizes


def _as_seen(v: Tensor, bias: Tensor | None, e: int, seen: Tensor) -> Tensor:
    """Returns `seen` with the gradients of v + bias."""
    v = v if bias is None else v + bias[e]
    return v + (seen.double() - v).detach()


def _one_slot(block: Block, t: int, s: int) -> Tensor:
    """Returns the output of one slot in the forward, by a routing weight of 1."""
    parts = (block.x[t, None], block.expert[t, s].reshape(1, 1), torch.ones(1, 1))
    return block._replace(**dict(zip(Block._fields, parts, strict=False)), out_dtype=F32).run()


def _gate_terms(u: Tensor, dh: Tensor, block: Block) -> Tensor:
    """Bounds the terms of du, from the bound `dh` of those of the gradient of h."""
    most, du = block.limit or torch.inf, torch.zeros_like(u)
    if block.gate == "none":
        g, v, places = u, torch.zeros_like(u), (du, torch.zeros_like(u))
    elif block.gate == "halves":
        (g, v), places = u.chunk(2, 1), du.chunk(2, 1)
    else:
        (g, v), places = (u[:, ::2], u[:, 1::2]), (du[:, ::2], du[:, 1::2])
    factor = 1.0 if block.gate == "none" else (v.clamp(-most, most) + block.shift).abs()
    places[0].copy_(dh * factor * 2 * g.abs().clamp(1, most))  # |act'| is at most 1.2
    places[1].copy_(dh * 2 * g.abs().clamp(1, most))
    return du


@given(block=blocks(), seed=st.integers(0, 99))
def test_a_block_has_the_gradients_of_the_oracle(block: Block, seed: int) -> None:
    """Within the roundings of the matmuls, sums and transforms, and 16 units of the derivative of
    an activation function."""
    g = torch.Generator().manual_seed(seed)
    tokens = min(len(block.x), 40)
    block = block.of_tokens(torch.arange(tokens))
    block = block._replace(up=_in_float(block.up), down=_in_float(block.down))
    grad = torch.randn(tokens, block.down.layout[0], generator=g)
    expected, sizes = oracle(block, grad)
    n, hidden, slots = block.down.layout[0], block.up.layout[0], block.expert.shape[1]
    terms = {"x": n + hidden + slots, "routing": n, "up_bias": n + tokens * slots}
    for threads in (1, 2):
        with on_threads(threads):
            found = gradients_of(block, grad)
        for name, d in found.items():
            bound = (terms.get(name, tokens * slots) + 64) * HALF_ULP * sizes[name]
            assert d.dtype == F32 and ((d.double() - expected[name]).abs() <= bound).all(), name


def _in_float(stack: Stack) -> Stack:
    return stack._replace(bias=None if stack.bias is None else stack.bias.float())


@pytest.mark.parametrize("limit", [0.0, 1.5])
@pytest.mark.parametrize("gate", GATED)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_of_a_gate(activation: str, gate: str, limit: float) -> None:
    """That of autograd in float64, of values within and beyond the limit."""
    g = torch.Generator().manual_seed(0)
    u = 3 * torch.randn(50, 64, generator=g)
    dh = torch.randn(50, 64 // GATED[gate], generator=g)
    wide = u.double().requires_grad_()
    h = gated(wide, activation, gate, limit, 1.0)
    (expected,) = torch.autograd.grad(h, wide, dh.double())
    found = gate_gradient(u, dh, activation, gate, limit, 1.0)
    size = 32 * HALF_ULP * u.abs().amax().clamp(1) ** 2 * dh.abs().amax()
    assert ((found.double() - expected).abs() <= size).all()
    assert limit == 0.0 or not found[u > limit].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_sixteen_bits(dtype: torch.dtype) -> None:
    """In the dtypes of their tensors, and near those in float32 of the same values: weights,
    gradients and what is between the products are rounded, 8 times at most."""
    block = a_block()
    halves = block._replace(
        x=block.x.to(dtype), routing=block.routing.to(dtype), out_dtype=dtype,
        up=block.up._replace(bias=block.up.bias.to(dtype)),  # type: ignore[union-attr]
        down=block.down._replace(bias=block.down.bias.to(dtype)),  # type: ignore[union-attr]
    )  # fmt: skip
    wide = halves._replace(
        x=halves.x.float(), routing=halves.routing.float(), out_dtype=F32,
        up=_in_float(halves.up), down=_in_float(halves.down),
    )  # fmt: skip
    small = 2.0**-14 * torch.randn(4, 40, generator=torch.Generator().manual_seed(3))
    grad = small.to(dtype)  # weights are up to 127
    found, expected = gradients_of(halves, grad), gradients_of(wide, grad.float())
    _, sizes = oracle(wide, grad.float())
    for name, d in found.items():
        assert d.dtype == dtype
        bound = 8 * torch.finfo(dtype).eps * sizes[name].float() + 1e-6
        assert ((d.float() - expected[name]).abs() <= bound).all(), name


def a_block(tokens: int = 4) -> Block:
    of = Weights(0, 64)
    up, down = stack_of(of, 3, 64, "int8", True), stack_of(Weights(1, 32), 3, 40, "int8", True)
    expert = torch.tensor([[0, 1], [2, 0], [1, 1], [0, 3]])[:tokens]  # one twice, and none
    routing, x = torch.rand(4, 2, generator=of.g), torch.randn(4, 64, generator=of.g)
    code = list(Code())
    return Block(x[:tokens], expert, routing[:tokens], up, down, code, code)


def test_no_tokens_and_experts_without_tokens() -> None:
    block = a_block(0)
    found = gradients_of(block, torch.zeros(0, 40))
    assert found["x"].shape == (0, 64) and not found["up_bias"].any()
    alone = a_block()._replace(expert=torch.full((4, 2), 3))  # of three experts none
    found = gradients_of(alone, torch.ones(4, 40))
    assert len(found) == 4 and not any(d.any() for d in found.values())


def test_tokens_in_another_order_have_the_same_gradients() -> None:
    """Of x and the routing weights, within the order of the rows of a matmul: none for one row of
    each expert at a time."""
    block, order = a_block(), torch.tensor([2, 0, 3, 1])
    grad = torch.randn(4, 40, generator=torch.Generator().manual_seed(3))
    found, moved = gradients_of(block, grad), gradients_of(block.of_tokens(order), grad[order])
    _, sizes = oracle(block, grad)
    for name in ("x", "routing"):
        bound = (40 + 64 + 64) * 2 * HALF_ULP * sizes[name][order]
        assert ((moved[name] - found[name][order]).abs() <= bound).all()


@pytest.mark.parametrize("name", LEAVES)
def test_only_what_is_asked_for(name: str) -> None:
    """Alone each gradient is what it is beside the others."""
    block, grad = a_block(), torch.ones(4, 40)
    leaves = leaves_of(block)
    alone = {n: t if n == name else t.detach() for n, t in leaves.items()}
    (found,) = torch.autograd.grad(with_leaves(block, alone).run(), alone[name], grad)
    assert same_bits(found, gradients_of(block, grad)[name])


def test_saved_are_codes_and_what_is_there_anyway() -> None:
    block, kept = a_block(), []
    given = {*map(id, (block.expert, block.up.packed, block.down.packed))}
    leaves = leaves_of(block)
    given |= {*map(id, leaves.values())}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with_leaves(block, leaves).run()
    assert sum(t.nbytes for t in kept if id(t) not in given) == 4 * 64 + 4 * 8


@pytest.mark.parametrize("which", ["linear_experts_backward", "experts_backward"])
def test_one_weight_is_dequantized_at_a_time(which: str) -> None:
    """With 8 experts the most bytes alive are those of two float weights, the results and rows."""
    of, n, k, tokens = Weights(0, 256), 256, 256, 16
    stack = stack_of(of, 8, n, "int8", False)
    x, code = torch.randn(tokens, k, generator=of.g), list(Code())
    codes, grad = list(ops.quantize.default(x, code)), torch.randn(tokens, n, generator=of.g)
    if which == "experts_backward":
        expert, routing = torch.arange(tokens)[:, None] % 8, torch.rand(tokens, 1)
        weights = (*stack, *stack, code, code, "silu", "none", 0.0, 0.0)
        call: Any = (grad, codes, expert, routing, *weights, F32, [True, True, False, False])
    else:
        offsets = torch.arange(2, tokens + 2, 2, dtype=torch.int32)
        operands = (grad, None, [], stack.packed, stack.layout, offsets, [*code, 8, 0])
        call = (*operands, None, None, k, F32, [True, False, False])
    most = most_bytes(lambda: REFERENCES[which](*call))
    one = n * k * (4 + 1)  # float and codes; a conversion may hold both floats
    assert most < 2 * one + 40 * tokens * (n + k) and most < 8 * n * k


def _double_backward(y: Tensor, leaf: Tensor) -> None:
    torch.autograd.grad(y.square().sum(), leaf, create_graph=True)


def test_second_derivatives_and_tangents_are_errors() -> None:
    block = a_block()
    leaves = leaves_of(block)
    with pytest.raises(NotImplementedError, match="qfx::experts has no second derivative"):
        _double_backward(with_leaves(block, leaves).run(), leaves["x"])
    p = _sorted()
    for run, name in ((p.run, "linear_experts_ste"), (p.frozen, "linear_experts")):
        with pytest.raises(NotImplementedError, match=f"qfx::{name} has no second derivative"):
            _double_backward(run(), p.x)
        with pytest.raises(NotImplementedError, match=f"{name}: argument 0 carries a forward"):
            torch.func.jvp(
                lambda x, r=run: (
                    type(r.__self__).run(p._replace(x=x))  # type: ignore
                    if r == p.run
                    else p._replace(x=x).frozen()
                ),
                (p.x,),
                (p.x,),
            )


def _sorted(**other: Any) -> Sorted:
    of = Weights(0, 32)
    x, grad = torch.randn(5, 32, generator=of.g), torch.randn(5, 8, generator=of.g)
    stack = stack_of(of, 2, 8, "int8", False)
    made = Sorted(x.requires_grad_(), None, stack, [2, 5], list(Code()), None, grad)
    return made._replace(**other)


def test_what_is_refused() -> None:
    p = _sorted()
    how = (p.offsets, None, p.code, "relu", F32)
    y = ops.linear_experts.default(p.x, *p.stack[:2], *how)
    with pytest.raises(NotImplementedError, match="without an activation function only, not with"):
        y.sum().backward()
    w = torch.randn(2, 8, 32, requires_grad=True)
    tail = (p.offsets, [*p.code, 8, 0], None, F32)
    for weights, said in (
        ((w, p.codes, p.stack.packed, p.stack.layout), "takes one, both is given"),
        ((None, p.codes, None, p.stack.layout), "takes one, neither is given"),
        ((w, p.codes, None, [*Layout(8, shift=1)]), "one scale for each row and no zero points"),
    ):
        with pytest.raises(ValueError, match=said):
            ops.linear_experts_ste.default(p.x, *weights, *tail)
    for ends, said in (([3, 2], "end at 2, expected between 3"), ([2, 6], "end at 6, expected")):
        with pytest.raises(ValueError, match=said):
            p._replace(ends=ends).run()
