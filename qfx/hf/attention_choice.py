"""Whether an attention of a transformers model trains with int8 gradients: measured at its first
step, once for each module."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from qfx.nn.attention import IN_FLOAT, scaled_dot_product_attention, why_not_int8
from qfx.nn.attention_gradients import CLOSE, gradient_cosine

_log = logging.getLogger(__name__)
_CALL = signature(scaled_dot_product_attention)
_near: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def attended(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Computes a call of `F.scaled_dot_product_attention` in int8, or by PyTorch if the module's
    int8 gradients were not near those in float at its first call that records gradients.

    The measurement is not repeated, so that what `torch.utils.checkpoint` runs again is what ran
    before."""
    call = _CALL.bind(*args, **kwargs)
    call.apply_defaults()
    if module not in _near and _is_measured(call.arguments):
        _near[module] = _is_near(module, call.arguments)
    if _near.get(module, True):
        return scaled_dot_product_attention(*args, **kwargs)
    return IN_FLOAT(*args, **kwargs)


def _is_measured(given: Mapping[str, Any]) -> bool:
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (q, k, v)):
        return False
    return not given["dropout_p"] and not why_not_int8(q, k, v, mask, given["enable_gqa"])


def _is_near(module: nn.Module, given: Mapping[str, Any]) -> bool:
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    mask = mask.float() if mask is not None and mask.dtype != torch.bool else mask
    scale = q.shape[-1] ** -0.5 if given["scale"] is None else float(given["scale"])
    cosine = gradient_cosine(q, k, v, mask, scale, given["is_causal"], given["enable_gqa"])
    if cosine < CLOSE:
        layer = getattr(module, "layer_idx", None)
        of = type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"
        _log.warning(
            "qfx_sdpa: %s stays float, because its int8 gradients have a cosine of "
            "%.3f to those in float, below %s", of, cosine, CLOSE,
        )  # fmt: skip
    return cosine >= CLOSE
