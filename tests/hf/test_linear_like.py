"""Linears of transformers that are no nn.Linear: GPT-2's Conv1D, weight [K, N], and Falcon's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import qfx
from qfx.hf import QfxConfig
from qfx.nn import Linear
from qfx.nn.linear_like import as_linear, is_linear
from qfx.nn.weight_bytes import weight_bytes
from qfx.ops.single_tensors import sqnr
from tests.lib.decoders import decoder, ids

NAMES = {"gpt2": 9, "falcon": 9}  # decoder -> linears


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(ids(2, 12)).logits
    return y


def with_plain_linears(model: Any) -> Any:
    """The same model, whose linears are nn.Linear."""
    model = copy.deepcopy(model)
    for name, module in [*model.named_modules()]:
        if is_linear(module):
            linear = as_linear(module)
            plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
            plain.weight = nn.Parameter(linear.weight.detach().clone())
            plain.bias = linear.bias
            model.set_submodule(name, plain)
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("smoothing", [True, False])
def test_it_is_what_an_nn_linear_would_be(name: str, smoothing: bool) -> None:
    model = decoder(name)
    expected, plain = logits(model), with_plain_linears(model)
    config = qfx.Config(smoothing=smoothing)
    quantized = qfx.quantize_(model, config)
    assert sum(isinstance(m, Linear) for m in quantized.modules()) == NAMES[name]
    assert weight_bytes(quantized).share > 0.95
    found = logits(quantized)
    assert (found - expected).norm() < 0.03 * expected.norm()
    if not smoothing:  # a transposed weight has another layout, and factors are of measured sums
        assert torch.equal(found, logits(qfx.quantize_(plain, config)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_saved_and_loaded(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = qfx.quantize_(decoder(name).to(dtype))
    qfx.save(made, tmp_path / "qfx")
    loaded = qfx.load(tmp_path / "qfx", decoder(name).to(dtype))
    assert torch.equal(logits(loaded), logits(made))


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_and_saves_it(name: str, tmp_path: Path) -> None:
    model = decoder(name)
    model.save_pretrained(tmp_path / "float")
    auto = transformers.AutoModelForCausalLM
    config = QfxConfig(smoothing=False)
    loaded = auto.from_pretrained(tmp_path / "float", quantization_config=config)
    expected = logits(qfx.quantize_(model, qfx.Config(smoothing=False)))
    assert torch.equal(logits(loaded), expected)
    loaded.save_pretrained(tmp_path / "int8")
    assert torch.equal(logits(auto.from_pretrained(tmp_path / "int8")), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_a_float_checkpoint_of_square_weights_is_turned(assign: bool) -> None:
    """GPT-2's c_proj is [768, 768], so no shape would tell that its floats are [K, N]."""
    model = decoder("gpt2")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantized = qfx.quantize_(model)
    before = logits(quantized)
    for each in quantized.modules():
        if isinstance(each, qfx.nn.Linear):
            each.reset_parameters()
    quantized.load_state_dict(state, assign=assign)
    assert sqnr(before, logits(quantized)) > 35


def test_what_is_left_float_stays_a_conv1d() -> None:
    model = qfx.quantize_(decoder("gpt2"), qfx.Config(skip=["*.c_proj"]))
    kinds = {n.rpartition(".")[2]: type(m).__name__ for n, m in model.named_modules() if "c_" in n}
    assert kinds == {"c_attn": "Linear", "c_proj": "Conv1D", "c_fc": "Linear"}


def test_training_with_learned_steps_leaves_it_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"Conv1D, whose weight is \[K, N\]: qfx.quantize_ takes"):
        made = qfx.prepare_qat(decoder("gpt2"))
    assert type(made.transformer.h[0].attn.c_attn).__name__ == "Conv1D"


def test_an_adapter_on_it_trains() -> None:
    quantized = qfx.quantize_(decoder("gpt2"))
    expected = logits(quantized)
    config = peft.LoraConfig(r=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = peft.get_peft_model(quantized, config)
    assert torch.equal(logits(model), expected)
    model.train()
    model(ids(2, 12), labels=ids(2, 12)).loss.backward()
    trained = [n for n, p in model.named_parameters() if p.grad is not None]
    assert len(trained) == 2 * 6 and all("lora_" in name for name in trained)
