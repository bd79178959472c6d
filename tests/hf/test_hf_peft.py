"""PEFT on models that transformers loaded in int8, by their own calls, from the float checkpoint to
a merged one on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM

import qfx
from qfx.hf import QfxConfig
from qfx.ops.single_tensors import sqnr
from tests.conftest import same_bits
from tests.hf.test_hf import IDS, bert, int8, llama, logits, same_tensors
from tests.nn.test_peft import codes, same, train

LORA: dict[str, Any] = {"r": 8, "lora_alpha": 32}
# How the model is made, and how it is read.
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], torch.dtype]] = {
    "default": ({"tied": False}, {}, torch.float32),
    "smoothed": ({"tied": False}, {"smoothing": True}, torch.float32),
    "groups": ({"tied": False}, {"scheme": "w8a8-groups"}, torch.float32),
    "bfloat16": ({"tied": False}, {}, torch.bfloat16),
    "tied": ({"tied": True}, {}, torch.float32),
    "tied, float head": ({"tied": True}, {"skip": ["lm_head"]}, torch.float32),
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("row", ROWS)
def test_a_model_is_loaded_adapted_merged_and_saved(row: str, tmp_path: Path) -> None:
    made, how, dtype = ROWS[row]
    llama(**made, dtype=dtype).save_pretrained(tmp_path / "float")

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "float", quantization_config=QfxConfig(**how), dtype=dtype
        )

    torch.manual_seed(1)
    model: Any = get_peft_model(base(), LoraConfig(**LORA, target_modules="all-linear"))
    before, losses = codes(model), train(model.train())
    assert losses[-1] < 0.9 * losses[0] and same(codes(model), before)
    y = logits(model.eval())
    model.merge_adapter()
    merged = logits(model)
    assert sqnr(y.float(), merged.float()) > 25 and not torch.equal(y, merged)
    model.unmerge_adapter()
    assert same_bits(logits(model), y) and same(codes(model), before)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert same_bits(logits(loaded), y)
    served = loaded.merge_and_unload(safe_merge=True)
    if dtype != torch.float32:  # a safe merge rounds what it adds to the type of the weight
        assert sqnr(merged.float(), logits(served).float()) > 25
        merged = logits(served)
    assert same_bits(logits(served), merged)
    served.save_pretrained(tmp_path / "served")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    assert same_bits(logits(again), merged) and same_tensors(again, served)
    assert int8(again) == int8(base()) and again.dtype == dtype


def test_an_encoder_is_adapted_and_merged(tmp_path: Path) -> None:
    """Without a head, as sentence embeddings are made."""
    bert().bert.save_pretrained(tmp_path / "float")
    read = AutoModel.from_pretrained(tmp_path / "float", quantization_config=QfxConfig())
    torch.manual_seed(1)
    model: Any = get_peft_model(read, LoraConfig(**LORA, target_modules=["query", "value"]))
    wanted, losses = torch.randn(IDS.shape[1], 64), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(20):
        loss = (model(IDS).last_hidden_state - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0] and losses[-1] == min(losses)
    with torch.no_grad():
        y = model.eval()(IDS).last_hidden_state
        served = model.merge_and_unload()
        merged = served(IDS).last_hidden_state
        assert sqnr(y, merged) > 25
        served.save_pretrained(tmp_path / "served")
        again: Any = AutoModel.from_pretrained(tmp_path / "served")
        assert same_bits(again(IDS).last_hidden_state, merged)
        assert any(isinstance(module, qfx.nn.Linear) for module in again.modules())
