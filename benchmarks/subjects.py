"""The models of the whole-model benchmark: `transformers` at full size, weights random.

Each takes tensors and returns tensors, so that every peer can capture or export it: first the last
hidden state, on which candidates are compared, then the logits of a language model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: configurations are made here

Inputs = tuple[Tensor, ...]
Outputs = tuple[Tensor, ...]
Sizes = dict[str, Any]
PIXELS, PAST = 224, 256
MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}


class Around(nn.Module):
    """A module around a model of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


class Encoder(Around):
    """An encoder: tokens [B, L] or pixels [B, 3, H, W] -> (hidden [B, L, D],)."""

    def forward(self, x: Tensor) -> Outputs:
        return (self.model(x).last_hidden_state,)


class Prefill(Around):
    """A prefill: tokens [B, L] -> (hidden [B, L, D], logits [B, L, V])."""

    def forward(self, tokens: Tensor) -> Outputs:
        hidden = self.model.model(tokens, use_cache=False).last_hidden_state
        return hidden, self.model.lm_head(hidden)


class Decode(Around):
    """A step: one token [B, 1] after a past of keys and values [B, heads, PAST, D / heads], two per
    layer -> (hidden [B, 1, D], logits [B, 1, V], the longer keys and values...).

    The cache grows and is not state: every exporter can express this, and the work is the same for
    all.
    """

    def forward(self, token: Tensor, *past: Tensor) -> Outputs:
        cache = cache_of(past)
        hidden = self.model.model(token, past_key_values=cache).last_hidden_state
        grown = (t for layer in cache.layers for t in (layer.keys, layer.values))
        return hidden, self.model.lm_head(hidden), *grown


def cache_of(past: Inputs) -> Any:
    """Returns a DynamicCache that holds `past` itself. Its constructor would copy, through an empty
    tensor of another rank, which OpenVINO cannot convert."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for keys, values in zip(past[::2], past[1::2], strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def bert(batch: int, tokens: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    from transformers import BertConfig, BertModel

    config = BertConfig(**sizes)
    model = BertModel(config, add_pooling_layer=False)
    return Encoder(model), (torch.randint(0, config.vocab_size, (batch, tokens)),)


def minilm(batch: int, tokens: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    """Returns a model with the sizes of all-MiniLM-L6."""
    return bert(batch, tokens, {**MINILM, **sizes})


def vit(batch: int, pixels: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(image_size=pixels, **sizes)
    model = ViTModel(config, add_pooling_layer=False)
    return Encoder(model), (torch.randn(batch, 3, pixels, pixels),)


def prefill(batch: int, tokens: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    model = opt(sizes)
    return Prefill(model), (torch.randint(4, model.config.vocab_size, (batch, tokens)),)


def decode(batch: int, past: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    """Returns a step after a real past, of random tokens."""
    model = opt(sizes)
    tokens = torch.randint(4, model.config.vocab_size, (batch, past + 1))
    with torch.no_grad():
        cache = model.eval()(tokens[:, :-1], use_cache=True).past_key_values
    keys_values = (t.clone() for layer in cache.layers for t in (layer.keys, layer.values))
    return Decode(model), (tokens[:, -1:].clone(), *keys_values)


def opt(sizes: Sizes) -> Any:
    """Returns OPT, by default with the sizes of opt-125m. Its head has its own copy of the
    embedding, which exporters otherwise transpose and dequantize at each call."""
    from transformers import OPTConfig, OPTForCausalLM

    model = OPTForCausalLM(OPTConfig(**sizes))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@dataclass(frozen=True)
class Subject:
    """A model of the benchmark. `make(batch, length, sizes)`: length in tokens, pixels or past
    tokens."""

    name: str
    make: Callable[[int, int, Sizes], tuple[nn.Module, Inputs]]
    batch: int
    length: int

    def build(self, sizes: Sizes | None = None) -> tuple[nn.Module, Inputs]:
        """Returns the model in eval mode and its inputs; `sizes` replace those of the
        configuration."""
        torch.manual_seed(0)
        model, inputs = self.make(self.batch, self.length, sizes or {})
        return model.eval(), inputs


SUBJECTS = (
    Subject("bert-1x128", bert, 1, 128),
    Subject("bert-8x128", bert, 8, 128),
    Subject("vit-1x224", vit, 1, PIXELS),
    Subject("minilm-32x128", minilm, 32, 128),
    Subject("opt-prefill-256", prefill, 1, 256),
    Subject("opt-token", decode, 1, PAST),
)
TABLE = {subject.name: subject for subject in SUBJECTS}
