"""Int8 experts of a checkpoint, in vLLM, with the classes of fake_vllm.py in the place of vLLM's:
the bits that were saved, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfx.hf.state_dict import scheme_numbers
from qfx.io.errors import UserError
from qfx.nn.stacked_weight import StackedWeight
from qfx.values.config import PRESETS
from qfx.vllm.plugin import register
from tests.vllm import fake_vllm as fake

E, K, WIDTH, T = 4, 64, 96, 7
NAME = "model.layers.0.mlp.experts"


@pytest.fixture(autouse=True)
def quantization(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with fake.installed():
        register()
        module = import_module("qfx.vllm.quantization")
        monkeypatch.setattr(module, "_version_of", lambda name: "0.32.0")
        yield fake.CONFIGS["qfx"]


def products(scheme: str = "w8a8") -> dict[str, StackedWeight]:
    g = torch.Generator().manual_seed(0)
    shapes = {"up": (E, 2 * WIDTH, K), "down": (E, K, WIDTH)}
    floats = {name: torch.randn(shape, generator=g) / 8 for name, shape in shapes.items()}
    return {n: StackedWeight.from_float(w, PRESETS[scheme]) for n, w in floats.items()}


def config(made: dict[str, StackedWeight]) -> dict[str, Any]:
    """Returns the quantization_config of a model with this block."""
    holder = nn.ModuleDict(made)
    linears = {f"{NAME}.{name}": numbers for name, numbers in scheme_numbers(holder).items()}
    return {"quant_method": "qfx", "format": 1, "linears": linears}


def files(made: dict[str, StackedWeight]) -> dict[str, Tensor]:
    """Returns the tensors of the block, with marks in the place of the float weights."""
    found = {f"{n}.{part}": t for n, w in made.items() for part, t in w.saved().items()}
    marks = ("gate_proj", "up_proj", "down_proj")
    found |= {f"{e}.{n}.weight": torch.ones(1, 2).char() for e in range(E) for n in marks}
    return found


def layer(found: Any, name: str = NAME, experts: int = E, kind: type = fake.RoutedExperts) -> Any:
    made = kind()
    made.create(found.get_quant_method(made, name), experts, WIDTH, K)
    return made


def load(block: Any, state: dict[str, Tensor]) -> list[str]:
    taken = [*block.load_weights(iter(state.items()))]
    block.quant_method.process_weights_after_loading(block)
    block.quant_method.process_weights_after_loading(block)
    return taken


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-groups", "w5a8", "w4a8"])
def test_experts_have_the_bits_that_were_saved(quantization: Any, scheme: str) -> None:
    made = products(scheme)
    found = quantization.from_config(config(made))
    block = layer(found)
    assert {*load(block, files(made))} == {"w13_weight", "w2_weight"}
    for name, product in (("w13_weight", "up"), ("w2_weight", "down")):
        assert torch.equal(getattr(block, name), made[product].packed)
    g = torch.Generator().manual_seed(1)
    x, routing = torch.randn(T, K, generator=g), torch.rand(T, 2, generator=g)
    ids = torch.randint(E, (T, 2), generator=g)
    up, down = made.values()
    both = (up.packed, up.layout, None, down.packed, down.layout, None, up.code, down.code)
    how = ("silu", "halves", torch.float32, 0.0, 0.0)
    wanted = torch.ops.qfx.experts(x, ids, routing, *both, *how)
    assert torch.equal(block(x, routing, ids.int()), wanted)
    assert "73,728 weights are int8 as saved, of 1 RoutedExperts" in str(found.saved.counts)


def test_float_experts_of_an_int8_checkpoint_are_vllms(quantization: Any) -> None:
    made = quantization.from_config(config(products()))
    assert made.get_quant_method(fake.RoutedExperts(), "model.layers.1.mlp.experts") is None


class Other(fake.RoutedExperts):
    """As those of GPT-OSS, which load their weights in a way of their own."""


def test_experts_that_the_operator_does_not_compute(quantization: Any) -> None:
    found = quantization.from_config(config(products()))
    sentence = r"are int8 in this checkpoint, but Other loads .*: quantize with skip=\['experts'\]"
    with pytest.raises(UserError, match=sentence):
        layer(found, kind=Other)


def test_one_product_of_two(quantization: Any) -> None:
    given = config(products())
    del given["linears"][f"{NAME}.up"]
    with pytest.raises(UserError, match=r"experts\.up is float beside an int8 product"):
        layer(quantization.from_config(given))


def test_experts_for_which_vllm_has_no_layer(quantization: Any) -> None:
    """vLLM would leave their tensors out without a word."""
    found = quantization.from_config(config(products()))
    with pytest.raises(UserError, match="vLLM has no layer of experts called model"):
        found.saved.report()


def test_experts_of_another_stage_of_a_pipeline(quantization: Any) -> None:
    given = config(products())
    given["linears"] |= {n.replace(".0.", ".1."): s for n, s in given["linears"].items()}
    found = quantization.from_config(given)
    layer(found)
    found.saved.report()


def without_scale(state: dict[str, Tensor]) -> None:
    del state["up.scale"]


def without_down(state: dict[str, Tensor]) -> None:
    for name in [name for name in state if name.startswith("down.")]:
        del state[name]


def of_another_scheme(state: dict[str, Tensor]) -> None:
    state["down.scheme"] = state["down.scheme"] + 1


def of_fewer_experts(state: dict[str, Tensor]) -> None:
    state["up.codes"] = state["up.codes"][1:]


FAULTS = {
    without_scale: "up.*scale",
    without_down: "no file of the model has model.layers.0.mlp.experts.down",
    of_another_scheme: "experts.down has another scheme in its file",
    of_fewer_experts: "up.codes does not belong to 4 experts. Ranks do not share",
}


@pytest.mark.parametrize("damage", FAULTS)
def test_damaged_files(quantization: Any, damage: Any) -> None:
    made = products()
    block, state = layer(quantization.from_config(config(made))), files(made)
    damage(state)
    with pytest.raises(UserError, match=FAULTS[damage]):
        load(block, state)


def test_a_rank_that_has_half_the_experts(quantization: Any) -> None:
    made = products()
    block = layer(quantization.from_config(config(made)), experts=E // 2)
    with pytest.raises(UserError, match=r"does not belong to 2 experts\. Ranks do not share"):
        load(block, files(made))
