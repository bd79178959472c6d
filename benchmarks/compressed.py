"""Checkpoints in the form of compressed-tensors: int8 weights with a scale for each output, and
activations that are quantized for each token (W8A8), as vLLM's own int8 linears read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.converted import made

_EIGHT = {"num_bits": 8, "type": "int", "symmetric": True}
_LINEARS = {
    "targets": ["Linear"],
    "weights": {**_EIGHT, "strategy": "channel", "dynamic": False},
    "input_activations": {**_EIGHT, "strategy": "token", "dynamic": True},
}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": _LINEARS},
}


def compressed(folder: Path) -> Path:
    """Returns a folder beside `folder`, a float32 checkpoint of transformers, with its linears
    rounded to int8."""

    def write(to: Path) -> None:
        from safetensors.torch import load_file, save_file

        to.mkdir()
        for file in folder.iterdir():
            if file.suffix in (".json", ".txt"):
                shutil.copy(file, to)
        given = json.loads((folder / "config.json").read_text())
        given |= {"quantization_config": CONFIG, "dtype": "bfloat16"}
        (to / "config.json").write_text(json.dumps(given))
        found: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            for name, t in load_file(file).items():
                found |= _rounded(name, t) if _is_linear(name, t) else {name: t.bfloat16()}
        save_file(found, to / "model.safetensors", metadata={"format": "pt"})

    return made(folder.with_name(f"{folder.name}-compressed-w8a8"), write)


def _is_linear(name: str, t: Tensor) -> bool:
    return t.ndim == 2 and name.endswith("_proj.weight")


def _rounded(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Returns codes for the scale as it is saved, in bfloat16."""
    scale = (weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127).bfloat16()
    codes = torch.round(weight / scale.float()).clamp(-128, 127).to(torch.int8)
    return {name: codes, f"{name}_scale": scale}
