"""Multiply-accumulates of a model, counted while it runs, by kind of operation.

The counter knows nothing of qfx: it sees the operators of PyTorch that multiply, and for recurrent
layers the function that computes all steps. Products with padding are counted like others, and
attention as if it had no mask.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Macs = Counter[str]
LINEAR, EXPERTS, RECURRENT = "linear", "experts", "recurrent"
GROUPED, TRANSPOSED = "grouped conv", "transposed conv"
COMPUTED = ", computed weight"
ACTIVATIONS = "two activations"
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_PRODUCTS = {  # the places of both factors
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear", "_grouped_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), (1, 2)),
    "grouped_mm_fallback": (0, 1),
}
_WEIGHT, _DERIVED = 2, 1


class MacCounter(TorchDispatchMode):
    """Counts multiply-accumulates by kind in `macs` while it is entered.

    A weight is a parameter or buffer of the model, or a tensor that is computed from these alone;
    the kind of such a product ends with COMPUTED. A product without a weight has the kind
    ACTIVATIONS.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.macs: Macs = Counter()
        self._known: dict[int, tuple[int, Tensor]] = {}  # kept, so that no address is used again
        self._paused = False
        for tensor in (*model.parameters(), *model.buffers()):
            self._mark(tensor, _WEIGHT)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if not self._paused:
            for kind, count in self._multiplied(func, args, given, result):
                self.macs[kind] += count
        self._follow([*args, *given.values()], result)
        return result

    def recurrent(self, call: Callable[[], Any], rows: int, weights: Iterable[Any]) -> Any:
        """Runs `call`, which multiplies each of `rows` rows by all matrices among `weights`."""
        matrices = [w for w in weights if isinstance(w, Tensor) and w.dim() == 2]
        self.macs[RECURRENT] += rows * sum(w.numel() for w in matrices)
        self._paused, before = True, self._paused
        try:
            return call()
        finally:
            self._paused = before

    def _multiplied(
        self, func: Any, args: Sequence[Any], given: Mapping[str, Any], result: Any
    ) -> Iterator[tuple[str, int]]:
        name = func._schema.name.split("::")[1]
        if name == "convolution":
            yield self._convolved(args, result)
        elif name.startswith("_scaled_dot_product") and "backward" not in name:
            q, k, v = args[:3]
            yield ACTIVATIONS, q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        elif name in ("lstm_float", "gru_float"):  # what graphs have in place of a layer's steps
            x, weight = args[:2]
            yield RECURRENT, x.shape[:2].numel() * weight.numel()
        elif name in _PRODUCTS:
            a, b = (args[place] for place in _PRODUCTS[name])
            if "grouped_mm" in name:
                ends = next(t for t in (*args[2:], *given.values()) if isinstance(t, Tensor))
                yield self._named(EXPERTS, a, b), int(ends[-1]) * b.shape[-2:].numel()
            else:
                columns = b.shape[0] if name == "linear" else b.shape[-1] if b.dim() > 1 else 1
                yield self._named(LINEAR, a, b), a.numel() * columns

    def _convolved(self, args: Sequence[Any], result: Tensor) -> tuple[str, int]:
        x, weight, transposed, groups = args[0], args[1], args[6], args[8]
        kind = f"conv {weight.dim() - 2}-D"
        kind = TRANSPOSED if transposed else GROUPED if groups > 1 else kind
        each = math.prod(weight.shape[1:])  # products of an element of x or of the result
        return self._named(kind, weight), (x if transposed else result).numel() * each

    def _named(self, kind: str, *factors: Tensor) -> str:
        level = max(map(self._level, factors))
        return kind if level == _WEIGHT else kind + COMPUTED if level else ACTIVATIONS

    def _level(self, tensor: Tensor) -> int:
        return self._known.get(tensor.untyped_storage().data_ptr(), (0,))[0]

    def _mark(self, tensor: Tensor, level: int) -> None:
        if address := tensor.untyped_storage().data_ptr():
            self._known[address] = (level, tensor)

    def _follow(self, given: Any, result: Any) -> None:
        """Marks what is computed from weights alone, and unmarks what other values are written
        to."""
        levels = [self._level(t) for t in tree_leaves(given) if isinstance(t, Tensor)]
        derived = bool(levels) and all(levels)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and self._level(tensor) != _WEIGHT:
                if derived:
                    self._mark(tensor, _DERIVED)
                else:
                    self._known.pop(tensor.untyped_storage().data_ptr(), None)


class _Recurrent(TorchFunctionMode):
    """Counts layers and cells of recurrent networks as one product for each weight and row."""

    def __init__(self, counter: MacCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def call() -> Any:
            return func(*args, **(kwargs or {}))

        name = getattr(func, "__name__", "")
        if name in CELLS:
            return self.counter.recurrent(call, args[0].shape[:-1].numel(), args[2:4])
        if name in LAYERS:
            *_, weights = (a for a in args if isinstance(a, list | tuple))
            return self.counter.recurrent(call, args[0].shape[:-1].numel(), weights)
        return call()


@contextmanager
def counting(counter: MacCounter) -> Iterator[Macs]:
    """Yields a counter that has, after the `with` block, what was multiplied inside it."""
    found: Macs = Counter()
    before = counter.macs.copy()
    with _Recurrent(counter), counter:
        yield found
    found.update(counter.macs - before)


@contextmanager
def expanded_attention() -> Iterator[None]:
    """Makes nn.MultiheadAttention and nn.TransformerEncoderLayer call single operators."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def macs_of(model: nn.Module, inputs: Mapping[str, Any]) -> Macs:
    """Returns the multiply-accumulates of one float forward of the model, by kind."""
    counter = MacCounter(model)
    with torch.no_grad(), expanded_attention(), counting(counter) as found:
        model(**inputs)
    return found


def by_weight(macs: Mapping[str, int]) -> int:
    """Returns the multiply-accumulates of products with a weight."""
    return sum(count for kind, count in macs.items() if kind != ACTIVATIONS)
