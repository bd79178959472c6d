"""Functions that replace functions of transformers in the copy of a model that is captured.

An attention that reads the int8 cache directly, with a softcap of scores, replaces the eager one,
which would convert the whole cache to floats at each step. A mask that is an input of the step
replaces the mask that a model computes itself, such as one with slopes (alibi).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from qfx.generate.model_state import ATTENTION
from qfx.hf.kv_layer import KVLayer

_NAME, _GIVEN = "qfx_cached", "qfx_given"
_KNOWN = {"sliding_window", "use_cache", "position_ids", "cache_position", "output_attentions"}
_here = threading.local()  # layers and masks of the step that this thread captures


@contextmanager
def stepping(layers: list[Any], masks: dict[str, Tensor]) -> Iterator[None]:
    """Makes modules that run in this thread inside the `with` block use this cache and these masks.
    Attention modules read the cache of the layer `layers[layer_idx]`. Modules that would compute a
    mask get one of `masks`, bool [B, 1, T, L]."""
    _here.layers, _here.masks = layers, masks
    try:
        yield
    finally:
        del _here.layers, _here.masks


def by_cached_attention(model: nn.Module) -> None:
    """Makes the attention modules of `model`, a copy that is captured, read the int8 cache by
    `_attend`."""
    _look_up(model, _NAME, nn.Module)


def by_given_masks(model: nn.Module) -> None:
    """Makes `model`, a copy that is captured, use the masks passed to `stepping` instead of masks
    that it computes, as float32: 0 for visible keys and -inf for others."""
    _look_up(model, _GIVEN, PreTrainedModel)
    for module in model.modules():
        table = module._buffers.get("bias")
        if table is not None and table.dtype == torch.bool and table.ndim == 4:
            del module._buffers["bias"]
            vars(module)["bias"] = _Rows("global" if bool(table[0, 0, -1].all()) else "local")


class _Rows:
    """Replaces the table in which GPT-Neo looks up which keys each query sees, for one kind of
    layers."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getitem__(self, part: Any) -> Tensor:
        found: Tensor = _here.masks[self._kind]
        return found


def _look_up(model: nn.Module, name: str, kind: type[nn.Module]) -> None:
    """Gives the modules of the class `kind` a copy of their config in which the attention
    implementation is the one registered as `name`."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and isinstance(module, kind):
            if id(config) not in configs:
                configs[id(config)] = copy.deepcopy(config)
                setattr(configs[id(config)], ATTENTION, name)
            vars(module)["config"] = configs[id(config)]


def _given(*args: Any, **kwargs: Any) -> Tensor:
    seen, *others = _here.masks.values()
    if others:  # modules use the mask of their kind of layers instead
        return torch.zeros(*seen.shape[:3], 1, dtype=torch.float32, device=seen.device)
    zeros = torch.zeros(seen.shape, dtype=torch.float32, device=seen.device)
    return zeros.masked_fill(seen.logical_not(), -torch.inf)


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
    """Computes what transformers' eager attention of Gemma 2 computes, but reads keys and values
    from the int8 cache of the module's layer. The values of the floats `key` and `value` are not
    used. Returns [B, T, H, D]."""
    if unknown := sorted(name for name in others.keys() - _KNOWN if others[name] is not None):
        raise ValueError(f"its attention takes {', '.join(unknown)}, which programs do not know")
    layer: KVLayer = _here.layers[module.layer_idx]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = (attention_mask, scale, key.shape[2], query.dtype, layer.table, softcap or 0.0)
    y = torch.ops.qfx.kv_attention(query, *layer.tensors, *how)
    return y.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_GIVEN, _given)
