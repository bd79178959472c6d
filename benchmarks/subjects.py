"""The models of the whole-model benchmark: `transformers` at full size, weights random.

Each takes tensors and returns tensors, so that every peer can capture or export it: first the last
hidden state, by which candidates are compared.
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


class Encoder(nn.Module):
    """Tokens [B, L] or pixels [B, 3, H, W] -> (hidden [B, L, D],)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Outputs:
        return (self.model(x).last_hidden_state,)


class Prefill(nn.Module):
    """Tokens [B, L] -> (hidden [B, L, D], logits [B, L, V])."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Outputs:
        hidden = self.model.model(tokens, use_cache=False).last_hidden_state
        return hidden, self.model.lm_head(hidden)


class Decode(nn.Module):
    """One token [B, 1] behind a past of keys and values [B, heads, PAST, D / heads], two a layer
    -> (hidden [B, 1, D], logits [B, 1, V], the longer keys and values...).

    A cache that grows and is no state: what every exporter can express, and the same work for all.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, *past: Tensor) -> Outputs:
        cache = _cache(past)
        hidden = self.model.model(token, past_key_values=cache).last_hidden_state
        grown = (t for layer in cache.layers for t in (layer.keys, layer.values))
        return hidden, self.model.lm_head(hidden), *grown


def _cache(past: Inputs) -> Any:
    """A DynamicCache that holds `past` as it is: its constructor copies, through an empty tensor of
    another rank, which OpenVINO cannot convert."""
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


def vit(batch: int, pixels: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(image_size=pixels, **sizes)
    model = ViTModel(config, add_pooling_layer=False)
    return Encoder(model), (torch.randn(batch, 3, pixels, pixels),)


def opt_prefill(batch: int, tokens: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    model = _opt(sizes)
    return Prefill(model), (torch.randint(4, model.config.vocab_size, (batch, tokens)),)


def opt_decode(batch: int, past: int, sizes: Sizes) -> tuple[nn.Module, Inputs]:
    """The past is a real one, of random tokens."""
    model = _opt(sizes)
    tokens = torch.randint(4, model.config.vocab_size, (batch, past + 1))
    with torch.no_grad():
        cache = model.eval()(tokens[:, :-1], use_cache=True).past_key_values
    keys_values = (t.clone() for layer in cache.layers for t in (layer.keys, layer.values))
    return Decode(model), (tokens[:, -1:].clone(), *keys_values)


def _opt(sizes: Sizes) -> Any:
    """The defaults of OPTConfig are those of opt-125m. The head is its own copy of the embedding,
    which exporters otherwise transpose and dequantize at each call."""
    from transformers import OPTConfig, OPTForCausalLM

    model = OPTForCausalLM(OPTConfig(**sizes))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@dataclass(frozen=True)
class Subject:
    """`make(batch, length, sizes)`: length in tokens, pixels or past tokens."""

    name: str
    make: Callable[[int, int, Sizes], tuple[nn.Module, Inputs]]
    batch: int
    length: int

    def build(self, sizes: Sizes | None = None) -> tuple[nn.Module, Inputs]:
        """The model in eval mode and its inputs; `sizes` differ from the configuration's own."""
        torch.manual_seed(0)
        model, inputs = self.make(self.batch, self.length, sizes or {})
        return model.eval(), inputs


SUBJECTS = (
    Subject("bert-1x128", bert, 1, 128),
    Subject("bert-8x128", bert, 8, 128),
    Subject("vit-1x224", vit, 1, PIXELS),
    Subject("opt-prefill-256", opt_prefill, 1, 256),
    Subject("opt-token", opt_decode, 1, PAST),
)
TABLE = {subject.name: subject for subject in SUBJECTS}
