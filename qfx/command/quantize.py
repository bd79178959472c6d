"""`qfx quantize`: a float model, loaded with int8 weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qfx.command.errors import CommandError
from qfx.command.model_kinds import NAMES, kind_of
from qfx.command.open_model import OpenedModel, open_model


def quantized(model: str, scheme: str, skip: Sequence[str], **inputs: Any) -> OpenedModel:
    """Opens a model of transformers with its weights quantized as they are read. Raises
    CommandError for other kinds, and for a model that is quantized already."""
    kind = kind_of(model)
    if kind != "transformers":
        raise CommandError(
            f"{model} is {NAMES[kind]}: `qfx quantize` takes models of transformers, and `qfx "
            "convert` writes others in another form"
        )
    from transformers import AutoConfig

    import qfx.hf

    if getattr(AutoConfig.from_pretrained(model), "quantization_config", None):
        raise CommandError(f"{model} is quantized already: `qfx convert` writes it in another form")
    how = qfx.hf.QfxConfig(scheme=scheme, skip=list(skip))
    return open_model(model, quantization=how, **inputs)
