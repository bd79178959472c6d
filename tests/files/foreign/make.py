"""Writes the files beside it, by the libraries themselves, and the values that these give back.

    pip install compressed-tensors torchao
    python -m tests.files.foreign.make tests/files/foreign

They are of one small Llama: three folders of compressed-tensors, as llm-compressor makes them (its
calibration is the range of the weights here), and two files of torchao. `values.json` holds the
SHA-256 of what each library dequantizes in float32.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
X8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
COMPRESSED: dict[str, dict[str, Any]] = {
    "w8a8": {"weights": W8, "input_activations": X8},
    "w4a16": {"weights": W4 | {"symmetric": True}},
    "w4a16_zeros": {"weights": W4 | {"symmetric": False}},
}
# Groups of a folder by themselves: bits, elements in a group (0: the row), zero points.
GRIDS = {
    f"w{bits}_{size or 'row'}{'_zeros' if zeros else ''}": (bits, size, zeros)
    for bits in (4, 8)
    for size in (0, 32, 64, 128)
    for zeros in (False, True)
}
TORCHAO = ("int8_weights", "int8_dynamic")


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip


def float_model(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    generator = torch.Generator().manual_seed(0)
    model = LlamaForCausalLM(config()).eval()
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        matrix = parameter.ndim == 2
        parameter.data = drawn / parameter.shape[-1] ** 0.5 if matrix else 1 + drawn / 8
    return model.to(dtype)


class Grids(nn.Module):
    """A linear of odd size for each row of GRIDS."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in GRIDS:
            self.add_module(name, nn.Linear(128, 3, bias=False))


def _model_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A float model, and the groups of its configuration."""
    if name != "grids":
        return float_model(), {"group_0": {"targets": ["Linear"], **COMPRESSED[name]}}
    groups = {}
    for at, (bits, size, zeros) in GRIDS.items():
        strategy = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
        weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, **strategy}
        groups[f"of_{at}"] = {"targets": [at if zeros else f"re:{at}$"], "weights": weights}
    return Grids(), groups


def compressed(name: str, folder: Path) -> dict[str, Tensor]:
    """Writes a folder; the float32 values of its quantized weights, of which there is no rounding
    to the model's bfloat16."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    model, groups = _model_of(name)
    said = {"quant_method": "compressed-tensors", "config_groups": groups}
    apply_quantization_config(model, QuantizationConfig(**said, ignore=["lm_head"]))
    values = {}
    for at, module in model.named_modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is None:
            continue
        args, w = scheme.weights, module.weight.data
        rows = w.unflatten(1, (-1, args.group_size or w.shape[1]))
        scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), args)
        module.weight_scale.data = scale.to(w.dtype)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.round().to(torch.int8)
        zeros = getattr(module, "weight_zero_point", None)
        codes = quantize(w, module.weight_scale, zeros, args, dtype=torch.int8)
        values[f"{at}.weight"] = dequantize(codes, module.weight_scale.float(), zeros, args=args)
    compressor = ModelCompressor.from_pretrained_model(model)
    assert compressor is not None
    compressor.compress_model(model)
    state = {n: t.contiguous() for n, t in model.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    written = model.config.to_json_string() if hasattr(model, "config") else "{}"
    (folder / "config.json").write_text(written)
    compressor.update_config(str(folder))
    return {n: v.detach().float() for n, v in values.items()}


def torchao(name: str, file: Path) -> dict[str, Tensor]:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    model = float_model()
    dynamic = Int8DynamicActivationInt8WeightConfig()
    how = dynamic if name == "int8_dynamic" else Int8WeightOnlyConfig()
    quantize_(model, how, lambda module, at: type(module) is nn.Linear and at != "lm_head")
    state = model.state_dict()
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, file, metadata)
    return {n: t.dequantize(torch.float32) for n, t in state.items() if hasattr(t, "qdata")}


def digest(values: Tensor) -> str:
    """Of float32 values, both zeros alike."""
    return hashlib.sha256((values.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def make(folder: Path) -> None:
    values: dict[str, Tensor] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*COMPRESSED, "grids"):
        found = compressed(name, folder / name)
        values |= {f"{name}/{n}": v for n, v in found.items()}
    for name in TORCHAO:
        found = torchao(name, folder / f"{name}.safetensors")
        values |= {f"{name}/{n}": v for n, v in found.items()}
    text = json.dumps({n: digest(v) for n, v in values.items()}, indent=1) + "\n"
    (folder / "values.json").write_text(text)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
