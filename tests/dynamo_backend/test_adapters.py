"""PEFT's adapters and accelerate's hooks, as a user puts them around a model: names, patterns,
recipes, and what changes the model after it was compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, attach_align_device_hook
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import qfx
from qfx.ops.single_tensors import sqnr
from tests.fuzz.checking import counting
from tests.lib.models import compiled

ALL = {"minimum_gain": 0, "scheme": "w8a8-asymmetric"}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 50}
TOKENS = torch.arange(14).reshape(2, 7)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def _lora(*targets: str, **more: Any) -> LoraConfig:
    return LoraConfig(r=8, init_lora_weights=False, target_modules=list(targets), **more)


def _llama() -> tuple[nn.Module, LoraConfig, Tensor]:
    config = LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, **TINY)
    return LlamaForCausalLM(config), _lora("q_proj", "v_proj", "down_proj"), TOKENS


def _bert() -> tuple[nn.Module, LoraConfig, Tensor]:
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=1, **TINY))
    adapted = _lora("query", "value", task_type="SEQ_CLS", modules_to_save=["classifier"])
    return model, adapted, TOKENS


def _sequential() -> tuple[nn.Module, LoraConfig, Tensor]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return model, _lora("0", "2"), torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


MODELS = {"llama": _llama, "bert": _bert, "sequential": _sequential}
SKIPPED = "classifier.original_module"  # kept beside its trained copy, and not called


def _base(name: str) -> tuple[nn.Module, LoraConfig, Tensor]:
    torch.manual_seed(0)
    return MODELS[name]()


def _adapted(name: str) -> tuple[Any, Tensor]:
    base, config, x = _base(name)
    return get_peft_model(base, config).eval(), x


def _linears(model: nn.Module) -> list[str]:
    named = model.named_modules()
    return [n for n, m in named if isinstance(m, nn.Linear) and not n.endswith(SKIPPED)]


def _logits(y: Any) -> Tensor:
    return y if isinstance(y, Tensor) else y.logits  # type: ignore[no-any-return]


def _close(f: Callable[..., Any], model: nn.Module, x: Tensor, int8: int) -> None:
    """In the second call, the first may compile."""
    f(x)
    y, ran = counting(f, [x])
    assert ran.linear == int8 and sqnr(_logits(model(x)), _logits(y)) > 25


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_has_its_name_once(name: str) -> None:
    model, x = _adapted(name)
    report = qfx.explain(model, x, options=ALL)
    linears = _linears(model)
    assert sorted(r.module for r in report.rows if r.module in linears) == sorted(linears)
    assert {r.module for r in report.rows} <= dict(model.named_modules()).keys()


@pytest.mark.parametrize("name", ["llama", "sequential"])
def test_patterns_mean_adapters(name: str) -> None:
    model, x = _adapted(name)
    linears = _linears(model)
    adapters = [n for n in linears if ".lora_" in n]
    bases = [n for n in linears if n.endswith(".base_layer")]
    assert adapters and bases
    with torch.no_grad():
        for options, int8 in (
            ({"skip": ["lora_A", "lora_B"]}, len(linears) - len(adapters)),
            ({"only": ["base_layer"]}, len(bases)),
            ({"skip": [bases[0], adapters[-1]]}, len(linears) - 2),
        ):
            torch._dynamo.reset()
            _close(compiled(model, **options), model, x, int8)


def test_a_recipe_of_an_adapted_model() -> None:
    model, x = _adapted("sequential")
    config = qfx.Config(scheme="w8a8-static", minimum_gain=0)
    recipe = qfx.calibrate(model, [x], config, progress=False)
    assert [site.name for site in recipe.sites if site.name not in _linears(model)] == []
    report = qfx.explain(model, x, options={**ALL, "recipe": recipe})
    schemes = {row.module: row.scheme for row in report.rows}
    assert len(recipe.sites) == len(_linears(model))
    assert all(
        schemes[site.name] == str(site.scheme and site.scheme.at(site.k)) for site in recipe.sites
    )
    with torch.no_grad():
        _close(compiled(model, recipe=recipe), model, x, len(recipe.sites))


def test_adapters_are_merged_switched_saved_and_loaded(tmp_path: Path) -> None:
    """One compiled function, whatever happens to the model in between."""
    model, x = _adapted("sequential")
    linears = _linears(model)
    base = sum(".lora_" not in n for n in linears)
    f = compiled(model)
    with torch.no_grad():
        _close(f, model, x, len(linears))
        model.merge_adapter()
        _close(f, model, x, base)
        model.unmerge_adapter()
        _close(f, model, x, len(linears))
        with model.disable_adapter():
            _close(f, model, x, base)
        model.add_adapter("other", _base("sequential")[1])
        model.eval().set_adapter("other")
        _close(f, model, x, len(linears))
        model.set_adapter("default")
        model.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(_base("sequential")[0], tmp_path).eval()
        assert torch.allclose(_logits(loaded(x)), _logits(model(x)), atol=1e-5)  # merging rounds
        _close(compiled(loaded), loaded, x, len(linears))
        merged = model.merge_and_unload()
        _close(compiled(merged), merged, x, base)


# --- accelerate ---


class Doubles(ModelHook):
    def pre_forward(self, module: nn.Module, x: Tensor) -> tuple[tuple[Tensor], dict[str, Any]]:
        return (2 * x,), {}

    def post_forward(self, module: nn.Module, y: Tensor) -> Tensor:
        return y + 1


HOOKS = {
    "of_a_linear": lambda model: add_hook_to_module(model[0], Doubles()),
    "of_the_model": lambda model: add_hook_to_module(model, Doubles()),
    "devices": lambda model: attach_align_device_hook(model, execution_device="cpu"),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_accelerate(name: str) -> None:
    """Some break the graph: each linear is then a frame of its own."""
    model, _, x = _base("sequential")
    HOOKS[name](model)
    assert [r.module for r in qfx.explain(model, x, options=ALL).rows] == ["0", "2"]
    with torch.no_grad():
        _close(compiled(model), model, x, 2)
        torch._dynamo.reset()
        _close(compiled(model, skip=["0"]), model, x, 1)
