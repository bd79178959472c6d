"""Logits that a head computes when something asks for them, or a chunk at a time in a loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfx.host.subclasses import wrapper
from qfx.host.tensors import tree_map, without_subclass
from qfx.nn.chunked_cross_entropy import chunked_cross_entropy
from qfx.nn.dtypes import output_dtype
from qfx.weights.change_detection import place_and_version

_Rows = tuple[Tensor, torch.dtype]  # inputs of the head, and the dtype of the logits
_Step = Callable[[Tensor], Tensor]


class Head:
    """A module that computes logits, while a model runs forward, which `is_open` says. `forward`:
    its own."""

    def __init__(self, module: nn.Module, forward: _Step, classes: int) -> None:
        self.module, self.forward, self.classes = module, forward, classes
        self.is_open = True
        self._made: list[weakref.ref[DeferredLogits]] = []

    def defer(self, x: Tensor) -> DeferredLogits:
        """Returns logits of x, as the head would compute them now: with this autocast."""
        kind, own = x.device.type, self.forward
        how = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}

        def forward(x: Tensor) -> Tensor:
            with torch.autocast(kind, **how):  # type: ignore[arg-type]
                return own(x)

        return DeferredLogits.of(_Source(self, forward, x), x, output_dtype(x))

    def note(self, logits: DeferredLogits) -> None:
        self._made.append(weakref.ref(logits))

    def compute(self, unused: bool = False) -> None:
        """Computes the logits that are deferred, or those alone whose loss did not use them."""
        for made in self._made:
            logits = made()
            if logits is not None and not (unused and logits.source.used):
                logits.computed()

    def close(self) -> None:
        """Ends the call. What nothing has used is computed while the weights are its own."""
        self.compute(unused=True)
        self.is_open = False

    @property
    def has_deferred(self) -> bool:
        return bool(self._made)


class _Source:
    """A call of a head. `used`: whether a loss was computed of it without logits."""

    def __init__(self, head: Head, forward: _Step, x: Tensor) -> None:
        self.head, self.forward, self.used = head, forward, False
        self._x, self._state = x, place_and_version(x)

    def check(self) -> None:
        if place_and_version(self._x) != self._state:
            raise RuntimeError(
                "the input of the head was changed in place before its logits were read. Leave "
                "qfx.chunked_loss() for this model"
            )


class DeferredLogits(Tensor):
    """Logits [..., V] of a head for x [..., K], not computed yet, inside of a model.

    `F.cross_entropy` of them, also after views, conversions and cuts of rows as losses have them,
    is computed a chunk of rows at a time. Any other function computes them once, and gets and
    returns plain tensors, to which they are equal from then on.
    """

    source: _Source
    x: Tensor
    before: tuple[DeferredLogits, _Step] | None  # what this is a view of, and which
    made: Tensor | None

    @classmethod
    def of(
        cls,
        source: _Source,
        x: Tensor,
        dtype: torch.dtype,
        before: tuple[DeferredLogits, _Step] | None = None,
    ) -> DeferredLogits:
        made = wrapper(cls, (*x.shape[:-1], source.head.classes), dtype, x.device)
        made.source, made.x, made.before, made.made = source, x, before, None
        with without_subclass():
            made.requires_grad_()
            made.register_hook(_refuse)
        source.head.note(made)
        return made

    def computed(self) -> Tensor:
        """Returns the logits as a plain tensor, the same one at each call. Raises RuntimeError if
        the model has returned, as its weights may have changed since."""
        if self.made is None:
            if self.before is None and not self.source.head.is_open:
                raise RuntimeError(
                    "these logits were not kept: their loss was computed in chunks. Leave "
                    "qfx.chunked_loss() to read the logits of a training step"
                )
            with torch.enable_grad():  # a metric may be without gradients, a loss after it is not
                if self.before is None:
                    self.source.check()
                    self.made = self.source.forward(self.x)
                else:
                    earlier, step = self.before
                    self.made = step(earlier.computed())
        return self.made

    @property
    def is_pending(self) -> bool:
        """Whether nothing has computed the logits, so that nothing can have changed them."""
        earlier = self.before[0] if self.before else None
        return self.made is None and (earlier is None or earlier.is_pending)

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
                return cls.of(logits.source, *rows, before)
        if _writes(func, named):  # copies that were taken before keep what they were
            tree_map(_compute_all, (tuple(args), named))
        plain: Any = tree_map(plain_logits, (tuple(args), named))
        return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} got logits that are not computed yet, from code that hides its calls from "
            "PyTorch's function protocol. Leave qfx.chunked_loss() for it"
        )


def _refuse(grad: Tensor) -> None:
    raise RuntimeError(
        "a gradient came to logits that were not computed, through a torch.autograd.Function that "
        "took them. Leave qfx.chunked_loss() for it"
    )


def plain_logits(value: Any) -> Any:
    """Returns a value, computed if it is deferred logits."""
    return value.computed() if isinstance(value, DeferredLogits) else value


def _compute_all(value: Any) -> Any:
    if isinstance(value, DeferredLogits):
        value.source.head.compute()
    return value


def _writes(func: Any, named: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    return in_place or name in ("__setitem__", "__set__") or named.get("out") is not None


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
    x, source = logits.x, logits.source
    if (weight, size_average, reduce) != (None, None, None) or reduction not in ("mean", "sum"):
        return None
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or x.ndim != 2:
        return None
    if target.shape != x.shape[:1] or target.device != x.device or 0 in x.shape:
        return None
    if not source.head.is_open:
        return None
    source.check()
    source.used = source.used or torch.is_grad_enabled()
    return chunked_cross_entropy(
        source.forward, x, target, source.head.classes, logits.dtype, ignore_index,
        label_smoothing, reduction == "mean", [*source.head.module.parameters()],
    )  # fmt: skip


# --- views, conversions and cuts of rows: each returns None if it is none ---


def _same(logits: DeferredLogits, *args: Any, **kwargs: Any) -> _Rows | None:
    return None if args or kwargs else (logits.x, logits.dtype)


def _to_float(logits: DeferredLogits, *args: Any, **kwargs: Any) -> _Rows | None:
    return None if args or kwargs else (logits.x, torch.float32)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> _Rows | None:
    (target,) = args if len(args) == 1 and not kwargs else (None,)
    if target in (torch.float32, logits.dtype):  # a narrower dtype would round
        return logits.x, target
    here = isinstance(target, torch.device | str) and torch.device(target) == logits.device
    return (logits.x, logits.dtype) if here else None


def _view(logits: DeferredLogits, *args: Any, **kwargs: Any) -> _Rows | None:
    sizes = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
    if kwargs or not sizes or not all(isinstance(n, int) for n in sizes):
        return None
    if sizes[-1] != logits.source.head.classes:
        return None
    return logits.x.reshape(*sizes[:-1], logits.x.shape[-1]), logits.dtype


def _flatten(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> _Rows | None:
    end = end_dim % logits.ndim
    return (logits.x.flatten(start_dim, end), logits.dtype) if end < logits.ndim - 1 else None


def _cut(logits: DeferredLogits, index: Any) -> _Rows | None:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(each, slice | int) or each is ... for each in parts):
        return None
    if len(parts) - parts.count(...) > logits.ndim - (... in parts):
        return None  # the last axis may be among those that are cut
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
