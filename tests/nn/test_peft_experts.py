"""PEFT's adapters on the parameters of experts (`target_parameters`): they need float experts, and
what int8 experts say about it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import qfx
from qfx.nn import Experts
from tests.lib.experts_blocks import IDS, model_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(model: Any, **more: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_parameters=TARGETS, **more))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def trained(model: Any, call: Any) -> list[float]:
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(leaves, lr=1e-2), []
    for _ in range(15):
        loss = call(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_adapted_experts_stay_float_until_merged(caplog: pytest.LogCaptureFixture) -> None:
    """Replaced they would have no parameter that the adapter changes. Then they become int8."""
    model = adapted(model_of("mixtral"))
    trained(model, model)
    expected = logits(model.eval())
    with caplog.at_level(logging.INFO, "qfx"), pytest.warns(UserWarning, match="stay float"):
        beside = qfx.quantize_(copy.deepcopy(model), qfx.Config(skip=["*lora*", "lm_head"]))
    assert "ParamWrapper adds an adapter to its gate_up_proj at each call: merge" in caplog.text
    assert not any(isinstance(m, Experts) for m in beside.modules())
    assert qfx.sqnr(expected, logits(beside)) > 25
    merged = qfx.quantize_(model.merge_and_unload(), qfx.Config(skip=["lm_head"]))
    assert sum(isinstance(m, Experts) for m in merged.modules()) == 2
    assert qfx.sqnr(expected, logits(merged)) > 20


def test_adapters_of_float_experts_beside_int8_linears_train() -> None:
    model = qfx.quantize_(model_of("mixtral"), qfx.Config(skip=["experts", "lm_head"]))
    model = adapted(model, target_modules=["q_proj", "v_proj"]).train()
    losses = trained(model, model)
    assert losses[-1] < 0.9 * losses[0]
    assert sum("experts" in n for n, p in model.named_parameters() if p.requires_grad) == 8


def test_compiled_they_train_in_float() -> None:
    """Dynamo does not capture the wrapper: its products are in no graph. Linears are int8."""
    exact, model = (adapted(model_of("mixtral")).train() for _ in range(2))
    options = {"minimum_gain": 0, "inner": "eager", "skip": ["*lora*"]}
    call = torch.compile(model, backend="qfx", options=options)
    wanted, found = trained(exact, exact), trained(model, call)
    assert found[-1] < 0.9 * found[0] and found != wanted
    fall = wanted[0] - wanted[-1]
    assert all(abs(a - b) < 0.1 * fall for a, b in zip(wanted, found, strict=True))


def test_int8_experts_have_no_such_parameters() -> None:
    """PEFT says that it found none; who reads one learns what there is instead."""
    model = qfx.quantize_(model_of("mixtral"), qfx.Config(skip=["lm_head"]))
    with pytest.raises(Exception, match="no `target_parameters` found"):
        adapted(copy.deepcopy(model))
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        adapted(copy.deepcopy(model), target_modules=["q_proj"])
    experts = next(m for m in model.modules() if isinstance(m, Experts))
    for name in ("gate_up_proj", "down_proj"):
        with pytest.raises(AttributeError, match=rf"no parameter {name}: its weights are int8"):
            getattr(experts, name)
    with pytest.raises(AttributeError, match="'Experts' object has no attribute 'other'"):
        experts.other  # noqa: B018
    weight = experts.up.dequantized(0)
    assert weight.dtype == torch.float32 and weight.shape == (experts.up.n, experts.up.k)
