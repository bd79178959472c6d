"""Activations that autograd saves for the backward pass, in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qfx.host.tensors import WeakStorage, has_values, storage_id, view_base, weak_storage
from qfx.nn.packed_flags import PackedFlags
from qfx.ops.code import Code
from qfx.values.limits import FEWEST_SAVED, FLOATS, NARROWEST_SAVED
from qfx.weights.change_detection import place_and_version

ops = torch.ops.qfx
# Functions whose gradients are sums of products of what they save, or smooth functions of it. A
# quotient is not: a small divisor would become zero.
FUNCTIONS = frozenset(
    ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mul", "square", "silu", "gelu",
     "sigmoid", "tanh", "layer_norm", "rms_norm", "group_norm", "conv1d", "conv2d", "conv3d",
     "__mul__", "__rmul__", "__matmul__", "__rmatmul__", "lora_update")
)  # fmt: skip
# Of these only what is as large as their largest operand: the others, and deviations that norms
# save, are statistics of rows or groups, which span orders of magnitude.
_WITH_STATISTICS = frozenset(("mul", "__mul__", "__rmul__", "layer_norm", "rms_norm", "group_norm"))
_DROPOUTS = frozenset(("dropout", "dropout_", "native_dropout"))
_POWERS = frozenset(("pow", "__pow__"))
_EXPONENTS = (2, 3)  # a root or an inverse is a quotient


class _Coded:
    """Codes of a tensor: int8 with a scale for each row."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        rows = tensor.detach().reshape(-1, tensor.shape[-1])
        seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=tensor.device)
        self.q, self.scale, self.zero_point = ops.quantize(rows, list(Code()), None, None, seed)

    def values(self) -> Tensor:
        found = ops.dequantize(self.q, self.scale, self.zero_point, None, None, "none", self.dtype)
        return found.reshape(self.shape)  # type: ignore[no-any-return]


class _Saved:
    """The hooks of autograd. One tensor that several operators save has its codes once."""

    def __init__(self) -> None:
        self.exact: set[int | None] | None = None  # storages that stay; None: all stay
        self.drops = False  # whether what is saved is the mask of a dropout
        self.fewest = 0  # elements of what is coded
        self._coded: WeakValueDictionary[Any, _Coded] = WeakValueDictionary()
        self._alive: dict[Any, WeakStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Coded | PackedFlags:
        if self.drops and tensor.numel() >= FEWEST_SAVED and has_values(tensor):
            return PackedFlags.of(tensor) or tensor
        if self.exact is None or not _is_large(tensor) or storage_id(tensor) in self.exact:
            return tensor
        if tensor.numel() < self.fewest:
            return tensor
        key = place_and_version(tensor)
        known, alive = self._coded.get(key), self._alive.get(key)
        if known is None or alive is None or alive.expired():
            known = self._coded[key] = _Coded(tensor)
            self._alive[key] = weak_storage(tensor)
        return known

    @staticmethod
    def unpack(saved: Tensor | _Coded | PackedFlags) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved.values()


def _is_large(tensor: Tensor) -> bool:
    if tensor.dtype not in FLOATS or tensor.ndim < 2 or not has_values(tensor):
        return False
    return tensor.shape[-1] >= NARROWEST_SAVED and tensor.numel() >= FEWEST_SAVED


class _FunctionWatch(TorchFunctionMode):
    """Tells the hooks which function runs, and which of its arguments exist anyway."""

    def __init__(self, saved: _Saved) -> None:
        super().__init__()
        self._saved = saved

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        before = self._saved.exact, self._saved.drops, self._saved.fewest
        name = getattr(func, "__name__", "")
        self._saved.drops = name in _DROPOUTS
        if name in FUNCTIONS or (name in _POWERS and _is_square_or_cube(args)):
            values = (*args, *(kwargs or {}).values())
            given = [each for each in values if isinstance(each, Tensor)]
            self._saved.exact = {storage_id(each) for each in given if _exists_anyway(each)}
            sizes = [each.numel() for each in given] if name in _WITH_STATISTICS else []
            self._saved.fewest = max(sizes, default=0)
        else:
            self._saved.exact = None
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._saved.exact, self._saved.drops, self._saved.fewest = before


def _is_square_or_cube(args: Sequence[Any]) -> bool:
    exponent = args[1] if len(args) > 1 else None
    return isinstance(exponent, int | float) and exponent in _EXPONENTS


def _exists_anyway(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, an input, or a view of one."""
    return tensor.is_leaf or view_base(tensor).is_leaf


@contextmanager
def save_in_int8() -> Iterator[None]:
    """Context manager in which autograd saves large activations as int8 codes with a scale for each
    row, stochastically rounded, a fourth of the bytes of float32.

        with qfx.save_in_int8():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    It holds for the inputs of linears, matmuls, convolutions, products, norms and smooth
    activation functions, [..., K] with K of at least 32 and at least 4096 elements. The masks of
    dropout are kept as one bit for each element, without a loss. Parameters, inputs of the model,
    attention, softmax and losses keep what they save, and so does a compiled graph, for which
    `saved_activations="int8"` is an option. The forward pass is unchanged, except that the seeds of
    the rounding are drawn from the default generator, from which dropout draws too. Gradients
    become noisy estimates. What `torch.utils.checkpoint` runs again is not compressed.
    """
    saved = _Saved()
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)
    with hooks, _FunctionWatch(saved):
        yield
