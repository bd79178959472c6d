"""Losses of language models without all logits at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from qfx.host.autograd import in_forward_mode, transforming
from qfx.host.distributed import is_sharded
from qfx.nn.deferred_logits import DeferredLogits, Head
from qfx.nn.dtypes import output_dtype
from qfx.values.limits import FLOATS


@contextmanager
def chunked_loss(model: nn.Module, head: nn.Module | None = None) -> Iterator[None]:
    """Context manager in which training steps of a language model never hold all its logits: the
    cross entropy and its gradients are computed a chunk of tokens at a time.

        with qfx.chunked_loss(model):
            model(input_ids=ids, labels=ids).loss.backward()

    `head`: the module whose output [..., V] are the logits, `model.get_output_embeddings()` by
    default, as models of transformers have it. It may be int8, have adapters, or train. Its output
    is computed when anything but `F.cross_entropy` reads it, such as a metric: then the step holds
    the logits as before. Without gradients, and in compiled graphs, nothing changes.

    The loss equals the one of all logits but for the order of its sum, and so do its gradients,
    which are computed in the forward pass and cannot be differentiated again. Raises ValueError
    if there is no head, or if it does not say its `out_features`.
    """
    found = _head_of(model) if head is None else head
    if any(map(is_sharded, model.modules())):
        warnings.warn(
            "qfx.chunked_loss: FSDP shards this model, which holds its logits", stacklevel=3
        )
        yield
        return
    classes = getattr(found, "out_features", None)
    if not isinstance(classes, int):
        raise ValueError(
            f"chunked_loss: the head of {type(model).__name__} is {type(found).__name__}, which "
            "has no out_features; give the linear that computes the logits, head=model.lm_head"
        )
    own, replaced = found.forward, vars(found).get("forward")
    deferring = Head(found, own, classes)

    @wraps(own)
    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or args or kwargs or not _is_recorded(x, deferring):
            return own(x, *args, **kwargs)
        return DeferredLogits.of(deferring, x, output_dtype(x))

    found.forward = forward
    try:
        yield
    finally:
        if replaced is None:
            del found.forward
        else:
            found.forward = replaced


def _head_of(model: nn.Module) -> Any:
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def _is_recorded(x: Any, head: Head) -> bool:
    """Whether autograd records what a head computes of x."""
    if type(x) is not Tensor or x.dtype not in FLOATS or x.ndim < 2 or not torch.is_grad_enabled():
        return False
    if transforming() or in_forward_mode():
        return False
    return x.requires_grad or any(p.requires_grad for p in head.parameters)
