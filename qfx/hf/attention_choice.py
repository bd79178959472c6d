"""Whether an attention of a transformers model trains with int8 gradients: measured at its first
step, once for each module."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from qfx.nn.attention import IN_FLOAT, scaled_dot_product_attention, why_not_int8
from qfx.nn.attention_gradients import CLOSE, gradient_cosine

_log = logging.getLogger(__name__)
_CALL = signature(scaled_dot_product_attention)
_NEAR = "qfx_sdpa_gradients_are_near"  # an attribute of the module, which copies of it have too


def attended(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Computes a call of `F.scaled_dot_product_attention` in int8, or by PyTorch if the module's
    int8 gradients were not near those in float at its first call in training mode, or the first
    one that records gradients.

    The measurement is not repeated, so that what `torch.utils.checkpoint` runs again is what ran
    before."""
    call = _CALL.bind(*args, **kwargs)
    call.apply_defaults()
    if not hasattr(module, _NEAR) and _is_measured(module, call.arguments):
        cosine = _cosine(call.arguments)
        if not math.isnan(cosine):  # values that are not finite say nothing
            setattr(module, _NEAR, cosine >= CLOSE)
            _say(module, cosine)
    if getattr(module, _NEAR, True):
        return scaled_dot_product_attention(*args, **kwargs)
    return IN_FLOAT(*args, **kwargs)  # type: ignore[no-any-return]


def _is_measured(module: nn.Module, given: Mapping[str, Any]) -> bool:
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if not recorded and not module.training:  # a reentrant checkpoint records none at first
        return False
    return not given["dropout_p"] and not why_not_int8(q, k, v, mask, given["enable_gqa"])


def _cosine(given: Mapping[str, Any]) -> float:
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    mask = mask.float() if mask is not None and mask.dtype != torch.bool else mask
    scale = q.shape[-1] ** -0.5 if given["scale"] is None else float(given["scale"])
    return gradient_cosine(q, k, v, mask, scale, given["is_causal"], given["enable_gqa"])


def _say(module: nn.Module, cosine: float) -> None:
    if cosine >= CLOSE:
        return
    layer = getattr(module, "layer_idx", None)
    of = type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"
    _log.warning(
        "qfx_sdpa: %s stays float, because its int8 gradients have a cosine of %.3f to those in "
        "float, below %s", of, cosine, CLOSE,
    )  # fmt: skip
