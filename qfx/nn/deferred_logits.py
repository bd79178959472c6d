"""Logits that a head computes when something asks for them, or a chunk at a time in a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.host.subclasses import wrapper
from qfx.host.tensors import tree_map, without_subclass
from qfx.nn.chunked_cross_entropy import chunked_cross_entropy

_Rows = tuple[Tensor, torch.dtype]  # inputs of the head, and the dtype of the logits
_Step = Callable[[Tensor], Tensor]


class Head:
    """A module that computes logits. `forward`: the forward that it had before."""

    def __init__(self, module: torch.nn.Module, forward: _Step, classes: int) -> None:
        self.forward, self.classes = forward, classes
        self.parameters = [*module.parameters()]


class DeferredLogits(Tensor):
    """Logits [..., V] of a head for x [..., K], not computed yet.

    `F.cross_entropy` of them, also after views, conversions and cuts of rows as losses have them,
    is computed a chunk of rows at a time. Any other function computes them once, and gets and
    returns plain tensors, to which they are equal from then on.
    """

    head: Head
    x: Tensor
    before: tuple[DeferredLogits, _Step] | None  # what this is a view of, and which
    made: Tensor | None

    @classmethod
    def of(
        cls,
        head: Head,
        x: Tensor,
        dtype: torch.dtype,
        before: tuple[DeferredLogits, _Step] | None = None,
    ) -> DeferredLogits:
        made = wrapper(cls, (*x.shape[:-1], head.classes), dtype, x.device)
        made.head, made.x, made.before, made.made = head, x, before, None
        return made

    def computed(self) -> Tensor:
        """Returns the logits as a plain tensor, the same one at each call."""
        if self.made is None:
            if self.before is None:
                self.made = self.head.forward(self.x)
            else:
                source, step = self.before
                self.made = step(source.computed())
        return self.made

    @property
    def is_pending(self) -> bool:
        """Whether nothing has computed the logits, so that nothing can have changed them."""
        source = self.before[0] if self.before else None
        return self.made is None and (source is None or source.is_pending)

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func in _ABOUT:
            with without_subclass():
                return func(*args, **named)
        if func is _REQUIRES_GRAD:
            return True
        logits = args[0] if args else None
        if isinstance(logits, DeferredLogits) and logits.is_pending:
            if func is F.cross_entropy:
                loss = _cross_entropy(*args, **named)
                if loss is not None:
                    return loss
            elif func in _ROWS and (rows := _ROWS[func](logits, *args[1:], **named)) is not None:
                before = (logits, lambda tensor: func(tensor, *args[1:], **named))
                return cls.of(logits.head, *rows, before)
        plain: Any = tree_map(lambda each: _plain(each), (tuple(args), named))
        return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} got logits that are not computed yet, from code that hides its calls from "
            "PyTorch's function protocol. Leave qfx.chunked_loss() for it."
        )


def _plain(value: Any) -> Any:
    return value.computed() if isinstance(value, DeferredLogits) else value


def _cross_entropy(
    logits: DeferredLogits,
    target: Any = None,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Returns the loss of logits [M, V] in chunks; None if the call needs all logits at once."""
    x, head = logits.x, logits.head
    if (weight, size_average, reduce) != (None, None, None) or reduction not in ("mean", "sum"):
        return None
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or x.ndim != 2:
        return None
    if target.shape != x.shape[:1] or target.device != x.device or 0 in x.shape:
        return None
    total = chunked_cross_entropy(
        head.forward, x, target, head.classes, logits.dtype, ignore_index, label_smoothing,
        head.parameters,
    )  # fmt: skip
    return total if reduction == "sum" else total / (target != ignore_index).sum()


# --- views, conversions and cuts of rows: each returns None if it is none ---


def _same(logits: DeferredLogits, *args: Any, **kwargs: Any) -> _Rows | None:
    return None if args or kwargs else (logits.x, logits.dtype)


def _to_float(logits: DeferredLogits, *args: Any, **kwargs: Any) -> _Rows | None:
    return None if args or kwargs else (logits.x, torch.float32)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> _Rows | None:
    (target,) = args if len(args) == 1 and not kwargs else (None,)
    if isinstance(target, torch.dtype) and target.is_floating_point:
        return logits.x, target
    here = isinstance(target, torch.device | str) and torch.device(target) == logits.device
    return (logits.x, logits.dtype) if here else None


def _view(logits: DeferredLogits, *args: Any, **kwargs: Any) -> _Rows | None:
    sizes = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
    if kwargs or not sizes or not all(isinstance(n, int) for n in sizes):
        return None
    if sizes[-1] != logits.head.classes:
        return None
    return logits.x.reshape(*sizes[:-1], logits.x.shape[-1]), logits.dtype


def _flatten(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> _Rows | None:
    end = end_dim % logits.ndim
    return (logits.x.flatten(start_dim, end), logits.dtype) if end < logits.ndim - 1 else None


def _cut(logits: DeferredLogits, index: Any) -> _Rows | None:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(each, slice | int) or each is ... for each in parts):
        return None
    whole = len(parts) < logits.ndim and ... not in parts
    if not whole and parts[-1] != slice(None) and parts[-1] is not ...:
        return None
    return logits.x[index], logits.dtype


_ROWS: dict[Any, Callable[..., _Rows | None]] = {
    Tensor.contiguous: _same, Tensor.float: _to_float, Tensor.to: _to,
    Tensor.view: _view, Tensor.reshape: _view, torch.reshape: _view,
    Tensor.flatten: _flatten, torch.flatten: _flatten, Tensor.__getitem__: _cut,
}  # fmt: skip
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_ABOUT = frozenset(
    (Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__,  # type: ignore[attr-defined]
     Tensor.layout.__get__, Tensor.is_cuda.__get__, Tensor.is_meta.__get__, Tensor.size,  # type: ignore[attr-defined]
     Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point)
)  # fmt: skip
