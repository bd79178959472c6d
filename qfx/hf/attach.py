"""attach: a model that `quantize_` made int8 is saved by save_pretrained as what it is."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from qfx.hf.config import QfxConfig
from qfx.hf.quantizer import QfxQuantizer, untie
from qfx.hf.state_dict import scheme_numbers
from qfx.nn.loading import StoredModule
from qfx.nn.stored_modules import stored_linears


def attach(model: nn.Module) -> None:
    """Gives the models of transformers in `model` that have int8 linears a quantizer, which writes
    them, and their config.json its part; unless they have one."""
    known: dict[StoredModule, list[int]] = {}  # each is unpacked for them
    for module in reversed([*model.modules()]):  # a configuration is that of the outermost at last
        free = isinstance(module, PreTrainedModel) and getattr(module, "hf_quantizer", None) is None
        if free and (linears := scheme_numbers(module, known)):
            said: Any = QfxConfig(linears=linears)
            vars(module)["hf_quantizer"] = QfxQuantizer(said, pre_quantized=True)
            module.config.quantization_config = said  # type: ignore[union-attr]
    untie(model, [name for name, _ in stored_linears(model)])
