"""Attention of modules to keys and values that an int8 cache gave them, by the operator that
programs use.

Programs read the codes of a cache, in integers (K3) to (K5). Modules get floats, and their own
attention to them is exact but for float rounding, while (K6) allows an error of 16-bit codes, which
is large enough to tip codes of activations. Inside `reading_codes` both use `kv_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2

from qfx.ops.kv_cache import kv_empty

_float = torch.nn.functional.scaled_dot_product_attention
_float_capped = modeling_gemma2.eager_attention_forward
ops = torch.ops.qfx


def _coded(k: Tensor, v: Tensor) -> tuple[Tensor, ...] | None:
    """Returns the cache that keys and values were read from: writing them gives its codes again,
    and scales to within float rounding. Returns None if they are from no cache, and for graphs that
    are captured."""
    if torch.compiler.is_compiling() or k.dtype != torch.float32 or k.shape != v.shape:
        return None
    batch, heads, length, d = k.shape
    for bits in product((8, 4), repeat=2):
        cache = kv_empty(batch, heads, length, d, *bits)
        ops.kv_write(*cache, k, v, torch.arange(length))
        again = (op(*part, length, k.dtype) for op, part in (
            (ops.kv_keys, cache[:2]), (ops.kv_values, cache[2:])
        ))  # fmt: skip
        if all(torch.allclose(a, b, 1e-5, 1e-6) for a, b in zip(again, (k, v), strict=True)):
            return cache
    return None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replaces scaled_dot_product_attention."""
    how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    cache = _coded(k, v)
    if cache is None:
        return _float(q, k, v, attn_mask, dropout_p, is_causal, **how)
    if is_causal:
        attn_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
    rest = (attn_mask, q.shape[-1] ** -0.5 if scale is None else scale, k.shape[2], q.dtype)
    y: Tensor = ops.kv_attention(q, *cache, *rest)
    return y


def _attend_capped(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any
) -> tuple[Tensor, Tensor | None]:
    """Replaces the attention of Gemma 2, whose scores have a softcap."""
    cache = _coded(k, v)
    if cache is None:
        return _float_capped(module, q, k, v, mask, **how)
    rest = (mask, how["scaling"], k.shape[2], q.dtype, None, how["softcap"])
    return ops.kv_attention(q, *cache, *rest).transpose(1, 2).contiguous(), None


@contextmanager
def reading_codes() -> Iterator[None]:
    """Replaces the attention of modules inside the `with` block. Attention that a model writes out
    itself stays."""
    with (
        patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend),
        patch.object(modeling_gemma2, "eager_attention_forward", _attend_capped),
    ):
        yield
