"""scaled_dot_product_attention: two products of activations with a softmax between.

attention: out = softmax(q [*B, M, D] @ k [*B, N, D].T * scale + mask) @ v [*B, N, E]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import compiled_autograd
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qfx.capture import value
from qfx.gpu.support import has_kernel

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
Size = int | torch.SymInt


@dataclass(frozen=True)
class Attention:
    """One attention. Its sizes as those of a matmul: M queries, K = D features, N keys."""

    node: fx.Node
    query: fx.Node
    key: fx.Node
    val: fx.Node
    mask: fx.Node | None
    scale: float
    causal: bool
    batch: Size
    m: Size
    k: Size
    n: Size
    dtype: torch.dtype
    path: str

    @property
    def name(self) -> str:
        return self.path or self.node.name

    @property
    def out(self) -> fx.Node:
        return self.node


def attention(node: fx.Node, arguments: dict[str, Any]) -> Attention | str:
    """The attention of a node, or why int8 does not serve it."""
    q, k, v, mask = (arguments.get(name) for name in NAMES[:4])
    values: list[Any] = [value(n) if isinstance(n, fx.Node) else None for n in (q, k, v, node)]
    if not all(isinstance(t, Tensor) for t in values):
        return "an attention whose shapes are not known"
    refusal = _refusal(values, arguments) or _mask_refusal(mask)
    if refusal is not None:
        return refusal
    seen_query, seen_key, _, _ = values
    scale = arguments.get("scale")
    if scale is None:
        scale = 1 / math.sqrt(seen_query.shape[-1])
    batch = math.prod(seen_query.shape[:-2])
    sizes = (batch, seen_query.shape[-2], seen_query.shape[-1], seen_key.shape[-2])
    causal = bool(arguments.get("is_causal", False))
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    return Attention(node, q, k, v, mask, float(scale), causal, *sizes, seen_query.dtype, "")


def _refusal(values: list[Tensor], arguments: dict[str, Any]) -> str | None:
    query, key, val, result = values
    if any(map(is_traceable_wrapper_subclass, values)):
        return "an attention of a tensor subclass"
    types = {t.dtype for t in values}
    if len(types) > 1 or types - {torch.float32, torch.bfloat16, torch.float16}:
        return "an attention that is not of one float type up to 32 bits"
    for device in (t.device for t in values):
        if not has_kernel("int8_attention", device):
            return f"an attention on {device.type}, for which int8_attention has no kernel"
    if compiled_autograd.in_compiled_autograd_region:
        return "an attention of a backward pass"
    if result.requires_grad:
        return "an attention whose gradient is recorded: it is not int8 yet"
    if arguments.get("dropout_p", 0.0) != 0:
        return "an attention with dropout"
    if arguments.get("enable_gqa"):
        return "an attention whose heads share keys (enable_gqa)"
    if not isinstance(arguments.get("scale", 1.0), float | int | type(None)):
        return "an attention whose scale is not a number"
    if not isinstance(arguments.get("is_causal", False), bool):
        return "an attention that is causal or not only at run time"
    if not isinstance(query.shape[-1], int):
        return "an attention whose feature size is not known"
    batches = [t.shape[:-2] for t in (query, key, val)]
    same = (
        statically_known_true(a == b)
        for other in batches[1:]
        for a, b in zip(batches[0], other, strict=False)
    )
    if len({len(b) for b in batches}) > 1 or not all(same):
        return "an attention with different batches of queries and keys"
    return None


def _mask_refusal(mask: Any) -> str | None:
    if mask is None:
        return None
    known = value(mask) if isinstance(mask, fx.Node) else None
    if not isinstance(known, Tensor):
        return "an attention whose mask is not known"
    if known.dtype not in (torch.bool, torch.float32):
        return f"an attention whose mask is {str(known.dtype).removeprefix('torch.')}"
    return None
