"""Models with int8 experts train what is around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import qfx
from qfx.nn import Experts
from qfx.report.experts_calls import in_float
from tests.conftest import same_bits
from tests.lib.experts_blocks import BY_MODEL, IDS, SCHEMES, block_of, model_of, routed

Leaves = dict[str, Tensor]


def leaves_of(block: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Leaves, Tensor]:
    """Returns what gradients go to, and the experts of the slots."""
    x, expert, routing = routed(dtype)
    found = {"x": x.requires_grad_(), "routing": routing.requires_grad_()}
    return found | {n: p for n, p in block.named_parameters() if "bias" in n}, expert


def gradients(f: Callable[..., Tensor], leaves: Leaves, expert: Tensor) -> Leaves:
    y = f(leaves["x"], expert, leaves["routing"])
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    return dict(zip(leaves, torch.autograd.grad(y, [*leaves.values()], grad), strict=True))


@BY_MODEL
def test_gradients_are_near_those_of_the_float_block(name: str) -> None:
    block = block_of(name)
    block = next(m for m in model_of(name).modules() if type(m) is type(block))
    made = Experts.from_float(copy.deepcopy(block))
    exact = gradients(block, *leaves_of(block))
    found = gradients(made, *leaves_of(made))
    ends = [n.rpartition(".")[2] for n in found]
    assert len(found) == len(exact) and ends[:2] == ["x", "routing"]
    for wanted, got in zip(exact.values(), found.values(), strict=True):
        assert got.dtype == wanted.dtype and qfx.sqnr(wanted, got) > 30


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_have_gradients(scheme: str) -> None:
    """Those of the same block with its own weights in float, within what the codes of activations
    change."""
    made = Experts.from_float(block_of("gpt-oss"), scheme)
    given = leaves_of(made)
    exact = gradients(lambda *tensors: in_float(made, *tensors), *given)
    found = gradients(made, *given)
    for name, wanted in exact.items():
        assert qfx.sqnr(wanted, found[name]) > (20 if scheme == "w7a7" else 28), name


def _checkpointed(made: Experts) -> Any:
    return lambda *given: checkpoint(made, *given, use_reentrant=False)


def _compiled(made: Experts) -> Any:
    return torch.compile(made, backend="aot_eager", fullgraph=True)


def _by_inductor(made: Experts) -> Any:
    return torch.compile(made, backend="inductor", fullgraph=True, dynamic=True)


def _by_qfx(made: Experts) -> Any:
    return torch.compile(made, backend="qfx", options={"inner": "aot_eager"}, fullgraph=True)


@pytest.mark.parametrize("way", [_checkpointed, _compiled, _by_inductor, _by_qfx])
def test_all_ways_have_the_same_gradients(way: Callable[[Experts], Any]) -> None:
    made = Experts.from_float(block_of("gpt-oss"))
    expected = gradients(made, *leaves_of(made))
    found = gradients(way(made), *leaves_of(made))
    assert all(same_bits(found[name], d) for name, d in expected.items())


def test_sixteen_bits_have_gradients() -> None:
    made = Experts.from_float(block_of("gpt-oss").bfloat16())
    found = gradients(made, *leaves_of(made, torch.bfloat16))
    exact = gradients(made.float(), *leaves_of(made))
    for name, wanted in exact.items():
        assert found[name].dtype == torch.bfloat16 and qfx.sqnr(wanted, found[name].float()) > 35


def trained(model: Any, call: Any, steps: int = 12) -> list[float]:
    """Returns the loss of each step."""
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(leaves, lr=3e-3), []
    for _ in range(steps):
        loss = call(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_what_is_around_frozen_experts_trains() -> None:
    """Embeddings, norms, routers and the head: as with the same experts frozen in float."""
    config = qfx.Config(skip=["*proj", "lm_head"])
    model = qfx.quantize_(model_of("mixtral"), config).train()
    assert sum(isinstance(m, Experts) for m in model.modules()) == 2
    before = {n: t.clone() for n, t in model.state_dict().items() if "experts" in n}
    exact = model_of("mixtral").train()
    for name, parameter in exact.named_parameters():
        parameter.requires_grad_("experts" not in name)
    wanted, found = trained(exact, exact), trained(model, model)
    assert found[-1] < 0.6 * found[0]
    fall = wanted[0] - wanted[-1]
    assert all(abs(a - b) < 0.05 * fall for a, b in zip(wanted, found, strict=True))
    after = model.state_dict()
    assert before and all(torch.equal(after[name], t) for name, t in before.items())
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_adapters_before_int8_experts_train() -> None:
    """Gradients pass through the experts to the adapters of earlier layers."""
    base = qfx.quantize_(model_of("mixtral"), qfx.Config(skip=["lm_head"]))
    torch.manual_seed(1)
    model = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    )
    losses = trained(model.train(), model, steps=30)
    assert losses[-1] < 0.9 * losses[0] and losses[-1] == min(losses)
    first = [n for n, p in model.named_parameters() if p.requires_grad and "layers.0." in n]
    assert len(first) == 4


def test_float_experts_train_in_int8() -> None:
    """A compiled model: its experts are int8 in both passes, its losses those of float."""
    exact, model = (model_of("mixtral").train() for _ in range(2))
    for each in (exact, model):
        each.set_experts_implementation("grouped_mm")
    options = {"minimum_gain": 0, "inner": "aot_eager"}
    call = torch.compile(model, backend="qfx", options=options)
    with profile() as profiled:
        found = trained(model, call)
    wanted = trained(exact, exact)
    counts = {row.key: row.count for row in profiled.key_averages()}
    for name in ("linear_experts_ste", "linear_experts_backward"):
        assert counts[f"qfx::{name}"] >= 12 * 4  # two products of two layers
    assert found[-1] < 0.6 * found[0]
    fall = wanted[0] - wanted[-1]
    assert all(abs(a - b) < 0.05 * fall for a, b in zip(wanted, found, strict=True))
