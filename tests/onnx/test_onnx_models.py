"""ONNX: whole models at several sizes, what is stored, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim

import qfx
from tests.lib.onnx_runtime import Session, exported


class Bert(nn.Module):
    """A BERT of one layer on tokens and a mask."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=32,
        )  # fmt: skip
        self.bert = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.bert(input_ids=ids, attention_mask=mask).last_hidden_state

    @staticmethod
    def inputs(rows: int, tokens: int) -> tuple[Tensor, ...]:
        lengths = torch.randint(1, tokens + 1, (rows, 1))
        return torch.randint(0, 100, (rows, tokens)), (torch.arange(tokens) < lengths).long()


class Patches(nn.Module):
    """A ViT of one layer, whose patches are a convolution, before a convolution of 3 x 3."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.ViTConfig(
            hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
            image_size=32, patch_size=8,
        )  # fmt: skip
        self.vit = transformers.ViTModel(config, add_pooling_layer=False)
        self.conv = nn.Conv2d(64, 24, 3, padding=1, stride=2)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.vit(image).last_hidden_state[:, 1:]
        return self.conv(tokens.transpose(1, 2).unflatten(2, (4, 4)))

    @staticmethod
    def inputs(rows: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, 3, 32, 32),)


MODELS = {
    "bert": (Bert, [(2, 7), (1, 1), (3, 32)], ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},) * 2, 6),
    "patches": (Patches, [(2,), (1,), (5,)], ({0: Dim.DYNAMIC},), 8),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_at_several_sizes(name: str, tmp_path: Path) -> None:
    """The float operators of two libraries differ by some roundings, 2^-20 of the largest element.
    So one code in 2^12 is at a tie and differs, by a step, whose square is 12 times that of the
    error of int8, on average. Over 8 linears the difference is at most 1/4 of that error."""
    make, sizes, dims, products = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    batches = [make.inputs(*size) for size in sizes]
    with torch.no_grad():
        floats = [model(*batch) for batch in batches]
    qfx.quantize_(model, qfx.Config(embeddings="int8"))
    session = Session(
        exported(model, batches[0], dims, optimize=name == "bert"), tmp_path / "model.onnx"
    )
    assert session.operators.count("MatMulIntegerToFloat") == products
    for batch, y_float in zip(batches, floats, strict=True):
        with torch.no_grad():
            y = model(*batch)
        assert (session(*batch)[0] - y).norm() < (y - y_float).norm() / 4


def test_int8_weights_and_what_is_stored(tmp_path: Path) -> None:
    model = qfx.quantize_(nn.Sequential(nn.Linear(64, 256)), qfx.Config(scheme="w8a8-symmetric"))
    found = exported(model, (torch.randn(2, 64),), None, "int8")
    stored = {v.name: v.const_value for v in found.model.graph.initializers.values()}
    assert sorted(t.dtype.name for t in stored.values() if t.size > 256) == ["INT8"]
    found.save(tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size < 64 * 256 * 2


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="weights is 'int4', not one of"):
        qfx.onnx_translation_table("int4")
    model = qfx.quantize_(nn.Sequential(nn.LSTM(64, 16)).eval())
    with pytest.raises(torch.onnx.OnnxExporterError) as refused:
        exported(model, (torch.randn(5, 2, 64),), None)
    why = "qfx::lstm has no translation to ONNX: name the modules that call it"
    assert why in str(refused.value)
