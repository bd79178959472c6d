"""Losses of language models without all logits at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import is_dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from qfx.host.autograd import in_forward_mode, transforming
from qfx.host.distributed import is_sharded
from qfx.host.modules import backward_hooks, global_hooks, pre_hooks
from qfx.nn.deferred_logits import DeferredLogits, Head
from qfx.nn.linear import Linear
from qfx.values.limits import FLOATS

_LAYERS = ("peft.tuners.", "peft.utils.other", "qfx.nn.fused_lora")
_WORTH = 1.5  # logits for each trained element of the head, whose gradients in float32 are kept


@contextmanager
def chunked_loss(model: nn.Module, head: nn.Module | None = None) -> Iterator[None]:
    """Context manager in which training steps of a language model never hold all its logits: the
    cross entropy and its gradients are computed a chunk of tokens at a time.

        with qfx.chunked_loss(model):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()

    It holds for models whose forward computes the loss, by `F.cross_entropy`, as those of
    transformers do with labels. `logits` of such an output is None. `head`: the module whose output
    [..., V] are the logits, `model.get_output_embeddings()` by default. It may be int8, have
    adapters, or train.

    Everything else is as outside: without labels or gradients, in compiled graphs, where the model
    scales or changes its logits, where the head has backward hooks or trains on few tokens, and
    under FSDP, which takes the weight of the head away after its call (with a warning). The loss
    equals the one of all logits but for the order of its sum, in float32, and so do its gradients,
    which are computed in the forward pass and cannot be differentiated again. Raises ValueError if
    there is no head, or one that is neither nn.Linear, qfx.nn.Linear, nor a layer of PEFT.
    """
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    found = _head_of(model) if head is None else head
    if any(map(is_sharded, model.modules())):
        text = "qfx.chunked_loss: FSDP shards this model, which holds its logits"
        warnings.warn(text, stacklevel=3)
        yield
        return
    calls = _HeadCalls(found, _classes(model, found))
    handles = [
        model.register_forward_pre_hook(calls.before),
        model.register_forward_hook(calls.after, always_call=True, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        calls.stop()


def _head_of(model: nn.Module) -> Any:
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def _classes(model: nn.Module, head: Any) -> int:
    classes = getattr(head, "out_features", None)
    if head is None:
        raise ValueError(
            f"chunked_loss: {type(model).__name__} does not say which module computes its logits; "
            "give it, as in head=model.lm_head"
        )
    if not isinstance(classes, int) or not _is_plain(head):
        raise ValueError(
            f"chunked_loss: the head of {type(model).__name__} is {type(head).__name__}; heads are "
            "nn.Linear, qfx.nn.Linear, and the layers of PEFT around them"
        )
    return classes


def _is_plain(head: nn.Module) -> bool:
    """Whether a head computes each row by itself, of its own parameters alone."""
    return type(head) in (nn.Linear, Linear) or type(head).__module__.startswith(_LAYERS)


class _HeadCalls:
    """The calls of a model: while one runs, the head returns deferred logits."""

    def __init__(self, head: nn.Module | None, classes: int) -> None:
        self._head, self._classes = head, classes
        self._running: list[tuple[Head, Any] | None] = []  # and the forward that the head had

    def __deepcopy__(self, memo: Any) -> _HeadCalls:
        return _HeadCalls(None, 0)  # of a copy of the model, which nothing stops

    def __reduce__(self) -> Any:
        return _HeadCalls, (None, 0)

    def before(self, model: nn.Module, args: Any) -> None:
        module = self._head
        if torch.compiler.is_compiling() or module is None:
            return
        if not torch.is_grad_enabled():
            self._running.append(None)
            return
        own = module.forward
        head = Head(module, own, self._classes)
        self._running.append((head, vars(module).get("forward")))

        @wraps(own)
        def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
            compiling = torch.compiler.is_compiling()
            if compiling or args or kwargs or not head.is_open or not _is_served(x, head):
                return own(x, *args, **kwargs)
            return head.defer(x)

        module.forward = forward

    def after(self, model: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not self._running:
            return None
        head = self._ended()
        if head is None or not head.has_deferred:
            return None
        found = _with_plain(output)
        head.close()
        return found

    def _ended(self) -> Head | None:
        ended = self._running.pop()
        if ended is None or self._head is None:
            return None
        head, replaced = ended
        if replaced is None:
            del self._head.forward
        else:
            self._head.forward = replaced
        return head

    def stop(self) -> None:
        """Ends what an exception that hooks do not see, as KeyboardInterrupt, left running."""
        while self._running:
            if (head := self._ended()) is not None:
                head.is_open = False


def _with_plain(output: Any) -> Any:
    """Returns what a model returns, without deferred logits in it."""
    if isinstance(output, Mapping):
        values = {key: _with_plain(value) for key, value in output.items()}
        if all(value is output[key] for key, value in values.items()):
            return output
        if is_dataclass(output):  # of transformers
            return type(output)(**values)
        made: Any = copy(output)
        made.update(values)
        return made
    if isinstance(output, tuple | list):
        items = [*map(_with_plain, output)]
        if all(one is other for one, other in zip(items, output, strict=True)):
            return output
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if not isinstance(output, DeferredLogits):
        return output
    return None if output.source.used and output.is_pending else output.computed()


def _is_served(x: Any, head: Head) -> bool:
    """Whether a head defers its logits of x: if autograd records them, and that saves memory."""
    if type(x) is not Tensor or x.dtype not in FLOATS or x.ndim < 2 or not torch.is_grad_enabled():
        return False
    if transforming() or in_forward_mode() or any(backward_hooks(head.module)) or global_hooks():
        return False
    if not torch.amp.is_autocast_available(x.device.type):  # meta
        return False
    if any(pre_hooks(head.module)):  # as weight_norm has, whose weight is a part of the graph
        return False
    trained = sum(p.numel() for p in head.module.parameters() if p.requires_grad)
    logits = x.shape[:-1].numel() * head.classes
    return logits >= _WORTH * trained and (trained > 0 or x.requires_grad)
