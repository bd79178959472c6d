"""Convolutions of transformers' models: quantized while they are loaded, saved and loaded again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qfx
from qfx.ops.single_tensors import sqnr
from tests.conftest import same_bits

transformers = pytest.importorskip("transformers")


def _vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=4,
    )  # fmt: skip
    return transformers.ViTModel(config)


def _resnet() -> Any:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1])
    return transformers.ResNetModel(config)


def _wav2vec2() -> Any:
    config = transformers.Wav2Vec2Config(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
    )  # fmt: skip
    return transformers.Wav2Vec2Model(config)


# A model -> its input, and how many of its convolutions become int8.
MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "patches": (_vit, (2, 3, 16, 16), 1),
    "images": (_resnet, (2, 3, 32, 32), 9),
    "sound": (_wav2vec2, (2, 600), 2),
}


@pytest.mark.parametrize("row", MODELS)
@pytest.mark.filterwarnings("ignore:qfx.from_pretrained")  # of weight norm
@pytest.mark.filterwarnings("ignore:qfx.quantize_")
def test_convolutions_are_loaded_and_saved(row: str, tmp_path: Path) -> None:
    make, shape, count = MODELS[row]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)

    def output(of: Any) -> Tensor:
        with torch.no_grad():
            y: Tensor = of.eval()(x).last_hidden_state
        return y

    wanted = output(model)
    model.save_pretrained(tmp_path / "float")
    load = type(model).from_pretrained
    made = load(tmp_path / "float", quantization_config=qfx.hf.QfxConfig("w8a8"))
    assert sum(isinstance(m, qfx.nn.Conv) for m in made.modules()) == count
    y = output(made)
    assert sqnr(wanted, y) > 30 and same_bits(y, output(qfx.quantize_(model)))
    made.save_pretrained(tmp_path / "int8")
    assert same_bits(output(load(tmp_path / "int8")), y)
