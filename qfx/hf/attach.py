"""attach: lets save_pretrained save a model that `quantize_` made int8."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from qfx.hf.config import QfxConfig
from qfx.hf.quantizer import QfxQuantizer, untie
from qfx.hf.state_dict import scheme_numbers
from qfx.nn.stored_modules import Stored, stored_linears


def attach(model: nn.Module) -> None:
    """Gives each transformers model in `model` that has int8 linears a quantizer, unless it has
    one. The quantizer writes the int8 linears and their part of config.json.
    """
    known: dict[Stored, list[int]] = {}  # computing them unpacks a module, so only once
    for module in reversed([*model.modules()]):  # the outermost last, as configs may be shared
        free = isinstance(module, PreTrainedModel) and getattr(module, "hf_quantizer", None) is None
        if free and (linears := scheme_numbers(module, known)):
            config: Any = QfxConfig(linears=linears)
            vars(module)["hf_quantizer"] = QfxQuantizer(config, pre_quantized=True)
            module.config.quantization_config = config  # type: ignore[union-attr]
    untie(model, [name for name, _ in stored_linears(model)])
