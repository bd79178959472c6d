"""scaled_dot_product_attention in int8, forward and backward, in eager code."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.host.autograd import in_forward_mode, transforming
from qfx.nn.dtypes import output_dtype
from qfx.values.limits import FLOATS, LARGEST_K, short

_PLAIN = (Tensor, torch.nn.Parameter)
IN_FLOAT: Any = F.scaled_dot_product_attention  # PyTorch's, whatever F has since
_log = logging.getLogger(__name__)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes what PyTorch's function of this name computes, with the same arguments, in int8:
    query [*B, M, D], key [*B, N, D], value [*B, N, E] -> [*B, M, E].

    Its gradients are int8 too, of keys whose mean is taken off, and memory grows with the number of
    tokens, not with its square: (A1) to (A6), (A11) to (A15) of docs/numerics.md. The result has
    the dtype of query, or that of autocast if it is on.

    What int8 does not serve, PyTorch computes, and a line of the log (INFO) says it once: one
    query, dropout, a mask with a gradient, devices other than the CPU, other dtypes than float32,
    bfloat16 and float16, `torch.func`. While `torch.compile` traces a call, it is PyTorch's, and
    the backend qfx decides. Models that call PyTorch's function use this one after

        torch.nn.functional.scaled_dot_product_attention = (
            qfx.nn.functional.scaled_dot_product_attention
        )

    and models of transformers with `attn_implementation="qfx_sdpa"`, which `import qfx.hf`
    registers.
    """
    compiling = torch.compiler.is_compiling()
    why_float = "" if compiling else why_not_int8(query, key, value, attn_mask, enable_gqa)
    why_float = why_float or ("dropout" if dropout_p > 0 and not compiling else "")
    if why_float:
        _say_float(why_float)
    if why_float or compiling:
        return IN_FLOAT(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.float()
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    given = (query, key, value, attn_mask, scale, is_causal, output_dtype(query))
    return torch.ops.qfx.int8_attention(*given)  # type: ignore[no-any-return]


def why_not_int8(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> str:
    """Returns the reason why an attention stays float, or an empty text."""
    tensors = [q, k, v, *([] if mask is None else [mask])]
    if any(type(t) not in _PLAIN for t in tensors) or transforming() or in_forward_mode():
        return "a tensor of another class, or torch.func"
    if any(t.device.type != "cpu" for t in tensors):
        return "a device other than the CPU"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS:
        return f"query, key and value are {', '.join(short(t.dtype) for t in (q, k, v))}"
    if mask is not None and mask.requires_grad:
        return "a mask with a gradient"
    if mask is not None and not (mask.is_floating_point() or mask.dtype == torch.bool):
        return f"a mask of {short(mask.dtype)}"
    if not q.dim() == k.dim() == v.dim() or q.dim() < 3:
        return "no axis of heads"
    if not _batches_fit(q, k, v, gqa):
        return "batches or heads that do not fit"
    if q.shape[-2] == 1:
        return "one query"
    if max(q.shape[-1], k.shape[-2]) > LARGEST_K or 0 in (*q.shape, *k.shape, *v.shape):
        return "no keys, or too many"
    return ""


def _batches_fit(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> bool:
    """Whether the batch axes broadcast; with `gqa`, heads of queries may be in groups."""
    batches = [t.shape[:-2] for t in (q, k, v)]
    if gqa and batches[1] == batches[2] and batches[0][:-1] == batches[1][:-1]:
        heads, groups = q.shape[-3], k.shape[-3]
        return groups > 0 and heads % groups == 0
    sizes = zip(*batches, strict=True)
    return all(len({size for size in each if size != 1}) <= 1 for each in sizes)


@cache
def _say_float(why: str) -> None:
    _log.info("attention stays float: %s", why)
