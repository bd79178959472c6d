"""int8 embeddings of models of transformers: quantized as they are loaded, saved and loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import qfx
from qfx.hf import QfxConfig
from qfx.nn import Embedding, Linear
from tests.conftest import same_bits
from tests.lib.decoders import decoder, ids

CONFIG = qfx.Config(embeddings="int8", smoothing=False)
# Decoder -> embeddings: tied and scaled; not tied; tied, with a table of positions.
MODELS = {"gemma3": 1, "llama": 1, "gpt2": 2}
BY_MODEL = pytest.mark.parametrize("name", MODELS)
BY_TYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def load(folder: Path, **how: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how)


def float_model(name: str, dtype: torch.dtype, folder: Path) -> Any:
    """As from_pretrained makes it, which keeps tables of positions in float32; and its files."""
    tied = {"tie_word_embeddings": True} if name == "gemma3" else {}
    decoder(name, **tied).to(dtype).save_pretrained(folder)
    return load(folder)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(ids(2, 12)).logits
    return y


def embeddings(model: Any) -> list[Embedding]:
    return [m for m in model.modules() if isinstance(m, Embedding)]


@BY_TYPE
@BY_MODEL
def test_a_checkpoint_becomes_what_quantize_makes(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = float_model(name, dtype, tmp_path)
    before = logits(model)
    made = load(tmp_path, quantization_config=QfxConfig(embeddings="int8"))
    expected = logits(qfx.quantize_(model, CONFIG))
    assert same_bits(logits(made), expected)
    assert len(embeddings(made)) == MODELS[name] and isinstance(made.lm_head, Linear)
    assert made.get_input_embeddings().weight.dtype == expected.dtype == dtype
    assert 0 < (expected - before).norm() < 0.05 * before.norm()


@BY_TYPE
@BY_MODEL
def test_transformers_saves_and_loads_it(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = qfx.quantize_(float_model(name, dtype, tmp_path / "float"), CONFIG)
    made.save_pretrained(tmp_path / "int8")
    again = load(tmp_path / "int8")
    assert same_bits(logits(again), logits(made)) and len(embeddings(again)) == MODELS[name]
    wide = load(tmp_path / "int8", dtype=torch.float32)
    assert {e(torch.tensor([1])).dtype for e in embeddings(wide)} == {torch.float32}
    for narrow, other in zip(embeddings(made), embeddings(wide), strict=True):
        assert same_bits(narrow.row_codes, other.row_codes)
        assert same_bits(narrow.scale, other.scale)


@BY_TYPE
@BY_MODEL
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_qfx_saves_and_loads_it(name: str, dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    model = float_model(name, dtype, tmp_path / "float")
    made = qfx.quantize_(copy.deepcopy(model), CONFIG)
    qfx.save(made, tmp_path / "int8")
    with torch.device(device):
        skeleton = type(model)(model.config).eval()
    loaded = qfx.load(tmp_path / "int8", skeleton)
    assert same_bits(logits(loaded), logits(made)) and len(embeddings(loaded)) == MODELS[name]
    (file,) = (tmp_path / "int8").glob("*.safetensors")
    values = sum(t.numel() * t.element_size() for t in made.state_dict().values())
    assert file.stat().st_size < values + 200 * len(made.state_dict()) + 1000  # no float table


def test_a_tied_head_keeps_codes_of_its_own(tmp_path: Path) -> None:
    model = qfx.quantize_(float_model("gemma3", torch.float32, tmp_path), CONFIG)
    assert isinstance(model.lm_head, Linear)
    assert isinstance(model.get_input_embeddings(), Embedding)
    assert model.get_input_embeddings().weight.shape == model.lm_head.weight.shape


@pytest.mark.parametrize("size", [200, 50])
def test_another_vocabulary_is_refused(size: int, tmp_path: Path) -> None:
    model = qfx.quantize_(float_model("llama", torch.float32, tmp_path), CONFIG)
    before = logits(model)
    with pytest.raises(ValueError, match=rf"\[{size}, 64\].*resize the float model"):
        model.resize_token_embeddings(size, mean_resizing=False)
    assert same_bits(logits(model), before)


def test_a_config_that_says_another_module_is_refused(tmp_path: Path) -> None:
    made = qfx.quantize_(float_model("llama", torch.float32, tmp_path / "float"), CONFIG)
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    linears = config["quantization_config"]["linears"]
    linears["model.norm"] = linears["model.embed_tokens"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"norm is an int8 embedding, and it is a LlamaRMSNorm"):
        load(tmp_path)
