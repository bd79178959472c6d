"""qfx.nn.Experts: bits of linears one by one, close to the float block, most of a model."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import qfx
from qfx.nn import Experts
from tests.conftest import same_bits
from tests.lib.experts_blocks import (
    BY_MODEL,
    IDS,
    MODELS,
    SCHEMES,
    E,
    H,
    J,
    T,
    block_of,
    linears_of,
    model_of,
    routed,
)


def share(model: nn.Module) -> float:
    """The share of the multiply-adds by weights that operators of qfx compute."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(IDS)
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    by_weights = {op: n for op, n in counts.items() if "attention" not in op and "bmm" not in op}
    int8 = sum(n for op, n in by_weights.items() if op.startswith("qfx."))
    return int8 / sum(by_weights.values())


@BY_MODEL
def test_experts_become_int8(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """All that multiplies but the routers, which the log says, and few projections of Mamba."""
    without = qfx.quantize_(model_of(name), qfx.Config(skip=["experts"], only=["*"]))
    with caplog.at_level(logging.INFO, "qfx"):
        model = qfx.quantize_(model_of(name))
    assert share(without) < MODELS[name][2]
    assert share(model) > 0.97
    assert any(isinstance(m, Experts) for m in model.modules())
    assert f"{E} of {H}x{2 * J}, {J}x{H}" in caplog.text
    router = "gate" if name not in ("gpt-oss", "granite", "jamba") else "router"
    assert f"{router} stays float" in caplog.text


@BY_MODEL
def test_the_block_is_close_to_the_float_block(name: str) -> None:
    """Given the same experts: the noise of 8 bits is 35 dB below, whatever the gate is."""
    block = block_of(name)
    with torch.no_grad():
        wanted = block(*routed())
    assert qfx.sqnr(wanted, Experts.from_float(block, "w8a8")(*routed())) > 35


def _activated(g: Tensor, activation: str) -> Tensor:
    """Applies an activation by the epilogue of the kernels, with the floats as scales of ones."""
    ones = torch.ones(g.numel(), 1, dtype=torch.int32)
    scale = g.reshape(-1, 1).contiguous()
    how = (None, None, None, activation, torch.float32)
    y: Tensor = torch.ops.qfx.dequantize.default(ones, scale, *how)
    return y.reshape(g.shape)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_the_bits_are_those_of_linears_one_by_one(name: str, scheme: str) -> None:
    block = block_of(name)
    turn = (lambda w: w.mT.contiguous()) if block.is_transposed else (lambda w: w)
    biases = [getattr(block, f"{part}_bias", None) for part in ("gate_up_proj", "down_proj")]
    ups = linears_of(turn(block.gate_up_proj.detach()), biases[0], scheme)
    downs = linears_of(turn(block.down_proj.detach()), biases[1], scheme)
    made, (x, expert, routing) = Experts.from_float(block, scheme), routed()
    gate = made.gate
    most, wanted = gate.limit or torch.inf, torch.zeros(T, H)
    with torch.no_grad():
        for t, slots in enumerate(expert.tolist()):
            for s, e in enumerate(slots):
                u = ups[e](x[t, None])
                g, v = (u[:, ::2], u[:, 1::2]) if gate.gate == "interleaved" else u.chunk(2, 1)
                h = _activated(g.clamp(max=most), gate.activation)
                y = downs[e](h * (v.clamp(-most, most) + gate.shift))
                wanted[t] += routing[t, s] * y[0]
        assert same_bits(made(x, expert, routing), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    """Casting the block casts its biases and nothing else."""
    made = Experts.from_float(block_of("gpt-oss").to(dtype))
    given = routed(dtype)
    with torch.no_grad():
        y = made(*given)
        assert same_bits(y, made.float()(given[0].float(), given[1], given[2].float()).to(dtype))
        assert same_bits(copy.deepcopy(made).to(dtype)(*given), y)


def test_compiled_and_with_or_without_recording() -> None:
    made, given = Experts.from_float(block_of("gpt-oss")), routed()
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    with torch.no_grad():
        wanted = made(*given)
        assert same_bits(compiled(*given), wanted)
    with torch.inference_mode():
        assert same_bits(made(*given), wanted)
    traced = qfx.trace(made)
    assert same_bits(traced(*given), wanted)
    y = made(given[0].requires_grad_(), *given[1:])
    assert y.requires_grad and same_bits(y.detach(), wanted)


def test_slots_of_experts_that_do_not_exist_add_nothing() -> None:
    made, (x, expert, routing) = Experts.from_float(block_of("mixtral")), routed()
    with torch.no_grad():
        first = made(x, expert[:, :1].contiguous(), routing[:, :1].contiguous())
        expert[:, 1] = E
        assert same_bits(made(x, expert, routing), first)
