"""Matches of scaled_dot_product_attention: two matmuls of activations with a softmax between them.

attention: out = softmax(q [*B, M, D] @ k [*B, N, D].T * scale + mask) @ v [*B, N, E]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import value
from qfx.graph.views import View
from qfx.graph.writes import writes
from qfx.host.gpu_build import has_kernel
from qfx.host.tensors import statically
from qfx.match.base import Match, Size
from qfx.match.refusals import of_activations
from qfx.match.repeated_heads import repeated

_KEYS = (torch.ops.qfx.kv_keys, torch.ops.qfx.kv_keys.default)
_VALUES = (torch.ops.qfx.kv_values, torch.ops.qfx.kv_values.default)
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True, kw_only=True)
class Attention(Match):
    """One attention. Its sizes are given as those of a matmul: M queries, K = D features, N
    keys."""

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
    gqa: bool = False  # groups of query heads share keys

    @property
    def left(self) -> tuple[fx.Node, View]:
        return self.query, ()

    @property
    def cache(self) -> tuple[Any, ...] | None:
        """The nodes (keys, key_scale, values, value_scale, length, block_table) if the attention
        reads an int8 cache and only its mask hides keys; otherwise None."""
        keys, values = _of_cache(self.key, _KEYS), _of_cache(self.val, _VALUES)
        if keys is None or values is None or self.causal or keys[2:] != values[2:]:
            return None
        return None if _written(self, self.key, self.val) else (*keys[:2], *values[:2], *keys[2:])

    @property
    def float_type(self) -> torch.dtype:
        return self.dtype


def attention(node: fx.Node, arguments: dict[str, Any]) -> Attention | str:
    """Returns the attention of a node, or the reason why int8 does not support it."""
    q, k, v, mask = (arguments.get(name) for name in NAMES[:4])
    values: list[Any] = [value(n) if isinstance(n, fx.Node) else None for n in (q, k, v, node)]
    refusal = _refusal(values, arguments) or _mask_refusal(mask)
    if refusal is not None:
        return refusal
    seen_query, seen_key, _, seen_result = values
    scale = arguments.get("scale")
    if scale is None:
        scale = 1 / math.sqrt(seen_query.shape[-1])
    causal, gqa = (bool(arguments.get(name, False)) for name in ("is_causal", "enable_gqa"))
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    found = Attention(
        node=node, path="", query=q, key=k, val=v, mask=mask, scale=float(scale), causal=causal,
        batch=math.prod(seen_result.shape[:-2]), m=seen_query.shape[-2], k=seen_query.shape[-1],
        n=seen_key.shape[-2], dtype=seen_query.dtype, gqa=gqa, trains=seen_result.requires_grad,
    )  # fmt: skip
    return _of_sources(found)


def _of_sources(attention: Attention) -> Attention:
    """Returns the attention with the keys and values from before the graph repeats their heads, if
    it does; otherwise `attention` itself."""
    (key, groups), (val, same) = repeated(attention.key), repeated(attention.val)
    if attention.gqa or groups == 1 or groups != same or _written(attention, key, val):
        return attention
    return replace(attention, key=key, val=val, gqa=True)


def _of_cache(node: fx.Node, targets: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Returns codes, scales, length and block table of a call that reads a cache as floats, or
    None."""
    if node.op != "call_function" or node.target not in targets or len(node.args) < 3:
        return None
    table = node.args[4] if len(node.args) > 4 else node.kwargs.get("block_table")
    return (*node.args[:3], table)


def _written(attention: Attention, *sources: fx.Node) -> bool:
    """Whether the graph may write to a tensor between one of the nodes `sources` and the
    attention."""
    node = attention.node.prev
    waiting = set(sources)
    while waiting:
        waiting.discard(node)
        if waiting and writes(node):
            return True
        node = node.prev
    return False


def _refusal(values: list[Tensor], arguments: dict[str, Any]) -> str | None:
    query, key, val, result = values
    operands = {"query": query, "key": key, "value": val}
    if why := of_activations("an attention", operands, result):
        return why
    for device in (t.device for t in values):
        if not has_kernel("int8_attention", device):
            return f"an attention on {device.type}, for which int8_attention has no kernel"
    if arguments.get("dropout_p", 0.0) != 0:
        return "an attention with dropout"
    if not isinstance(arguments.get("scale", 1.0), float | int | type(None)):
        return "an attention whose scale is not a number"
    if not isinstance(arguments.get("is_causal", False), bool):
        return "an attention that is causal or not only at run time"
    if not isinstance(arguments.get("enable_gqa", False), bool):
        return "an attention whose heads share keys or not only at run time"
    if not isinstance(query.shape[-1], int):
        return "an attention whose feature size is not known"
    if not _batches_fit(query, key, val, bool(arguments.get("enable_gqa", False))):
        return "an attention with different batches of queries and keys"
    return None


def _batches_fit(query: Tensor, key: Tensor, val: Tensor, gqa: bool) -> bool:
    """Whether the batch axes are known to be equal, or 1. With `gqa`, heads of queries may be in
    groups."""
    batches = [list(t.shape[:-2]) for t in (query, key, val)]
    if len({len(batch) for batch in batches}) > 1:
        return False
    if gqa and batches[0]:
        heads, *others = (batch.pop() for batch in batches)
        if not all(isinstance(h, int) for h in (heads, *others)):
            return False
        if others[0] != others[1] or others[0] == 0 or heads % others[0]:
            return False
    return all(_broadcasts(sizes) for sizes in zip(*batches, strict=True))


def _broadcasts(sizes: tuple[Size, ...]) -> bool:
    large = [size for size in sizes if not statically(size == 1)]
    return all(statically(size == large[0]) for size in large)


def _mask_refusal(mask: Any) -> str | None:
    if mask is None:
        return None
    known = value(mask) if isinstance(mask, fx.Node) else None
    if not isinstance(known, Tensor):
        return "an attention whose mask is not known"
    if known.requires_grad:
        return "an attention: the gradient of its mask is recorded, and is not int8"
    if known.dtype not in (torch.bool, torch.float32):
        return f"an attention whose mask is {str(known.dtype).removeprefix('torch.')}"
    return None
