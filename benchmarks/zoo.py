"""Architectures of `transformers`, each as small as possible without losing its structure, with
random weights.

benchmarks/zoo.json has the sizes of each kind, and for each architecture its kind, its model class,
the differences of its configuration from the kind's sizes, and its inputs if they differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: configurations are made here

VOCABULARY, WIDTH = 256, 64
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One architecture. `differs`: configuration in addition to the kind's sizes, less `without`;
    `inputs`: only if they differ from the kind's."""

    kind: str
    model: str
    differs: dict[str, Any] = field(default_factory=dict)
    inputs: str = ""
    without: tuple[str, ...] = ()


_DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
KINDS: dict[str, Inputs] = _DATA["kinds"]
TABLE = {name: Architecture(**row) for name, row in _DATA["architectures"].items()}


def build(row: Architecture, batch: int = 2, tokens: int = 16) -> tuple[nn.Module, Inputs]:
    """Returns the model in eval mode, with nothing random from call to call, and inputs of that
    size."""
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, row.model)
    sizes = {k: v for k, v in KINDS[row.kind].items() if k not in row.without}
    config = model_class.config_class(**{**sizes, **row.differs})
    _adjust(config)
    model = model_class(config).eval()
    return model, INPUTS[row.inputs or row.kind](batch, tokens)


def _adjust(config: Any) -> None:
    """Turns off all dropout and masking of the input, and makes weights as large as at full size.

    The usual deviation of 0.02 is meant for rows of some thousand features. With rows of 64,
    linears would add almost nothing to the residual stream, and their errors would go unnoticed.
    """
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name in ("initializer_range", "init_std"):
            setattr(config, name, WIDTH**-0.5)
        elif "layer_scale_init" in name:
            setattr(config, name, 1.0)
        elif hasattr(value, "sub_configs"):
            _adjust(value)
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False


def _ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens))


def _image(batch: int, side: int = 32) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, side, side)}


def _forecast(batch: int, tokens: int) -> Inputs:
    past, future = (batch, 19), (batch, 8)
    return {
        "past_values": torch.rand(past),
        "past_time_features": torch.randn(*past, 2),
        "past_observed_mask": torch.ones(past),
        "future_values": torch.rand(future),
        "future_time_features": torch.randn(*future, 2),
    }


INPUTS: dict[str, Callable[[int, int], Inputs]] = {  # of kinds, and of single architectures
    **dict.fromkeys(
        ("encoder", "decoder", "mixture of experts", "recurrent"),
        lambda b, t: {"input_ids": _ids(b, t)},
    ),
    "encoder-decoder": lambda b, t: {"input_ids": _ids(b, t), "decoder_input_ids": _ids(b, t)},
    "vision": lambda b, t: _image(b),
    "audio": lambda b, t: {"input_values": torch.randn(b, 125 * t)},
    "large_image": lambda b, t: _image(b, 64),
    "image_and_text": lambda b, t: {**_image(b), "input_ids": _ids(b, t)},
    "mel_and_text": lambda b, t: {
        "input_features": torch.randn(b, 16, 64),
        "decoder_input_ids": _ids(b, t),
    },
    "spectrogram": lambda b, t: {"input_values": torch.randn(b, 64, 32)},
    "latent_text": lambda b, t: {"inputs": torch.randn(b, t, 32)},
    "series": lambda b, t: {"past_values": torch.randn(b, 32, 3)},
    "forecast": _forecast,
}
