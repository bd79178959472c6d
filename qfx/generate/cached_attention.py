"""An attention function of transformers that reads the int8 cache itself, with a softcap of scores.

It stands in the copy of a model that is captured, in the place of the eager attention, whose sums
over the whole cache in float a step would otherwise hold.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qfx.generate.private_names import ATTENTION
from qfx.hf.kv_layer import KVLayer

_NAME = "qfx_cached"
_KNOWN = {"sliding_window", "use_cache", "position_ids", "cache_position", "output_attentions"}
_here = threading.local()  # the layers of the step that this thread captures


@contextmanager
def attending_to(layers: list[Any]) -> Iterator[None]:
    """A context in which modules of this thread attend to the caches of these layers, each to that
    of its `layer_idx`."""
    _here.layers = layers
    try:
        yield
    finally:
        del _here.layers


def by_cached_attention(model: nn.Module) -> None:
    """Lets the modules of `model`, a copy that is captured, attend by this function."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            if id(config) not in configs:
                configs[id(config)] = copy.deepcopy(config)
                setattr(configs[id(config)], ATTENTION, _NAME)
            vars(module)["config"] = configs[id(config)]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers' eager attention of Gemma 2; `key` and `value`, in float, are not read."""
    if unknown := sorted(name for name in others.keys() - _KNOWN if others[name] is not None):
        raise ValueError(f"its attention takes {', '.join(unknown)}, which programs do not know")
    layer: KVLayer = _here.layers[module.layer_idx]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = (attention_mask, scale, key.shape[2], query.dtype, layer.table, softcap or 0.0)
    y = torch.ops.qfx.kv_attention(query, *layer.tensors, *how)
    return y.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
