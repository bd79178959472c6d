"""QuantizedWeight: a weight that stores int8 codes and behaves like a tensor of floats."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qfx.host.subclasses import as_parameter, become, wrapper
from qfx.host.tensors import has_values, without_subclass
from qfx.nn.float_proxy import FloatProxy, ViewCall
from qfx.nn.float_weight import PreviousWeight, check_written, nearest, weight_after_write
from qfx.nn.frozen import Frozen, Prepared, cut, each, float_weight, freeze, prepared
from qfx.nn.sharded_weight import ShardedWeight
from qfx.nn.weight_view import WeightView
from qfx.ops.storage import Values, values_of
from qfx.values.limits import FLOATS
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe

_SHARED_FIELDS = ("memory", "scheme", "how")


class Memory:
    """The tensors that all aliases of a quantized weight share.

    `frozen`: the tensors; `names`: the fields of `frozen` that are not None; `earlier`: the codes
    from before the last writes, which are restored if a write is undone (Q13).
    `has_scales_of_whole`: whether this is a part of the columns of a larger weight and still has
    the scales of that weight. A write to the part gives it scales of its own.
    """

    def __init__(self, frozen: Frozen, has_scales_of_whole: bool = False) -> None:
        self.earlier: tuple[PreviousWeight, ...] = ()
        self.has_scales_of_whole = has_scales_of_whole
        self.hold(frozen)

    def hold(self, frozen: Frozen) -> None:
        """Replaces the tensors by `frozen`."""
        self.frozen = frozen
        fields = zip(Frozen._fields, frozen, strict=True)
        self.names = [name for name, tensor in fields if tensor is not None]


class QuantizedWeight(ShardedWeight, FloatProxy):
    """A weight [N, K] with a float dtype that stores a packed quantized weight.

    Reading it gives the floats that the codes represent. Writing to it, or to a view of it,
    quantizes the result into the same memory in such a way that small changes are not lost and that
    undoing a write restores the earlier codes (Q13). `F.linear(x, weight, bias)`, and the matmuls
    to which PyTorch reduces it, run int8 kernels. It does not train.

    `scheme`: how the weight and its input are quantized, including the rotation in use.
    """

    scheme: Scheme
    how: Prepared
    memory: Memory

    @staticmethod
    def __new__(
        cls, weight: Tensor, requires_grad: bool = False, **attributes: Any
    ) -> QuantizedWeight:
        """Creates a parameter from a quantized weight, or a quantized weight from floats [N, K].

        Parameter classes are called this way. `attributes` are those that the weight already has.

        Raises ValueError for a weight on the meta device: accelerate creates one in order to look
        up the weight by name in the state dict later, and a state dict has only codes.
        """
        if isinstance(weight, QuantizedWeight):
            if weight.is_meta and not attributes:
                raise ValueError(
                    "accelerate does not offload int8 weights, which a state dict has as codes: "
                    "leave their modules on a device (device_map), or float (skip=[...])"
                )
            return as_parameter(weight.alias())  # type: ignore[return-value]
        return cls.of(weight)

    __init__ = object.__init__  # type: ignore[assignment]

    @classmethod
    def holding(
        cls,
        frozen: Frozen,
        scheme: Scheme,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> QuantizedWeight:
        """Returns a weight of this shape [N, K] with the tensors `frozen`. `frozen` and `scheme`:
        results of `freeze`."""
        return cls._made(Memory(frozen), scheme, shape, dtype)

    @classmethod
    def _made(
        cls, memory: Memory, scheme: Scheme, shape: Sequence[int], dtype: torch.dtype
    ) -> QuantizedWeight:
        weight = wrapper(cls, shape, dtype, memory.frozen.packed.device)
        weight.memory, weight.scheme, weight.how = memory, scheme, prepared(scheme, int(shape[0]))
        return weight

    @classmethod
    def of(
        cls,
        weight: Tensor,
        how: Scheme | SiteRecipe | None = None,
        channels: int | None = None,
    ) -> QuantizedWeight:
        """Quantizes the float weight [N, K], by default with `qfx.Scheme()`. `channels`: of a
        pixel, if rows of x are windows of pixels. Raises ValueError for a scheme that needs a
        recipe, and for a recipe for another shape or weight."""
        scheme, frozen = freeze(weight.detach(), how or Scheme(), channels)
        return cls.holding(frozen, scheme, weight.shape, weight.dtype)

    @property
    def frozen(self) -> Frozen:
        """The packed weight and the tensors that its input is quantized with."""
        return self.memory.frozen

    @property
    def unpacked(self) -> Values:
        """Codes, scales and zero points, unpacked, in a layout that does not depend on the
        processor."""
        return values_of(self.packed, self.scheme.w, self.scheme.group, *self.shape)

    @property
    def packed(self) -> Tensor:
        """The packed weight: bytes as the kernels read them."""
        return self.memory.frozen.packed

    @property
    def factor(self) -> Tensor | None:
        """The factor float32 [K] that multiplies x; None if the scheme has none."""
        return self.memory.frozen.factor

    @property
    def x_scale(self) -> Tensor | None:
        """The static scale of activations, float32 [1]; None if the scheme has none."""
        return self.memory.frozen.x_scale

    @property
    def x_zero_point(self) -> Tensor | None:
        """The zero point int32 [1] of activations with a static scale, or None."""
        return self.memory.frozen.x_zero_point

    @property
    def shift(self) -> Tensor | None:
        """The learned shift float32 [K] that is added to x first, or None."""
        return self.memory.frozen.shift

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The number of bytes of the tensors that store the weight."""
        return sum(t.nbytes for t in self.frozen if t is not None)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the float weight [N, K] that multiplies x before its transform, in the dtype of
        this weight or in `dtype`. Equation (R1)."""
        n, k = self.shape
        return float_weight(self.frozen, self.scheme, n, k).to(dtype or self.dtype)

    def settle(self) -> None:
        """Frees the earlier codes that are kept to undo writes; for a model that was merged for
        good."""
        self.memory.earlier = ()

    def write(self, value: Tensor) -> None:
        """Quantizes `value` [N, K] into the memory of this weight. (Q13)"""
        if not has_values(self.packed):
            return
        n, k = self.shape
        check_written(value, n, k, self.packed)
        before, earlier = self.frozen, self.memory.earlier
        rounding = max(_rounding(self.dtype), _rounding(value.dtype))
        made, earlier = weight_after_write(
            self._widened(value), before, earlier, self.scheme, rounding
        )
        if made is before:
            return
        if earlier and earlier[-1].frozen is before:
            earlier = (*earlier[:-1], earlier[-1]._replace(frozen=each(torch.clone, before)))
        self.memory.earlier = earlier
        self.memory.has_scales_of_whole = False
        self._hold(made)

    def requantize(self, value: Tensor) -> None:
        """Quantizes the floats `value` [N, K] and replaces the weight by the result, codes and
        scales, as `load_state_dict` does with floats. The earlier codes have no influence. (R1)"""
        n, k = self.shape
        check_written(value, n, k, self.packed)
        self.memory.has_scales_of_whole = False
        self._hold(nearest(value, self.frozen, self.scheme))
        self.settle()

    def _hold(self, made: Frozen) -> None:
        if not self.store(made):
            self.memory.hold(made)

    def _widened(self, value: Tensor) -> Tensor:
        """Returns `value` in float32. An element that equals the current weight rounded to the
        narrow dtype becomes the unrounded current value."""
        if value.dtype == torch.float32:
            return value
        wide = self.dequantize(torch.float32)
        return torch.where(value == wide.to(value.dtype), wide, value.float())

    def store(self, made: Frozen) -> bool:
        """Copies the tensors of `made` into those of this weight if they have the same dtypes,
        shapes and devices; returns whether they have."""
        if _forms(self.frozen) != _forms(made):
            return False
        for mine, its in zip(self.frozen, made, strict=True):
            if mine is not None and its is not None and mine is not its:
                mine.copy_(its)
                if not mine.is_inference():  # copy_ below autograd does not count the write
                    torch.autograd.graph.increment_version(mine)
        return True

    @torch.no_grad()
    def load(self, other: QuantizedWeight, assign: bool = False) -> bool:
        """Becomes a copy of `other`, whose scheme may differ.

        Takes the tensors of `other` themselves if `assign`. Otherwise copies the values into the
        memory of this weight, or, where the tensors differ in shape, dtype or device, into new
        memory. Returns False if it cannot, as `become` does.
        """
        same = self.scheme == other.scheme and self.shape == other.shape
        if not assign and same and self.store(other.frozen):
            self.memory.has_scales_of_whole = other.memory.has_scales_of_whole
            self.settle()
            return True
        if self.is_shared():
            warnings.warn(
                f"qfx: a weight {other.scheme} was loaded into one {self.scheme} that processes "
                "share: the others keep the former one",
                stacklevel=2,
            )
        return self.become(other if assign else other.to(self.device, self.dtype, copy=True))

    def become(self, other: Any) -> bool:
        """Turns this object into `other`, including its dtype, for everything that refers to it.
        Returns False if that is not possible, for example on another kind of device."""
        if not become(self, other):
            return False
        vars(self).update({name: vars(other)[name] for name in _SHARED_FIELDS})
        return True

    def alias(self) -> QuantizedWeight:
        """Implements `FloatProxy.alias`."""
        return self._made(self.memory, self.scheme, self.shape, self.dtype)

    def viewed(self, taken: ViewCall, like: Tensor) -> WeightView:
        """Implements `FloatProxy.viewed`."""
        return WeightView(self, (taken,), like)

    def like(self, frozen: Frozen, dtype: torch.dtype | None = None) -> QuantizedWeight:
        """Returns another weight of this shape and scheme, with the tensors `frozen`, which are
        copies of those of this weight."""
        memory = Memory(frozen, self.memory.has_scales_of_whole)
        return self._made(memory, self.scheme, self.shape, dtype or self.dtype)

    def cut(self, rows: tuple[int, int], columns: tuple[int, int]) -> QuantizedWeight | None:
        """Returns a separate weight made of these rows and columns with the same codes; None if the
        columns are cut within a group or a rotated block."""
        made = cut(self.frozen, self.scheme, tuple(self.shape), rows, columns)
        shape = (rows[1] - rows[0], columns[1] - columns[0])
        if made is None:
            return None
        return self._made(Memory(made, True), self.scheme, shape, self.dtype)

    # --- support for tracing, copying and other processes ---

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self.memory.names, (self.scheme, self.dtype)  # at each call of a compiled graph

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> QuantizedWeight:
        frozen = Frozen(*[inner.get(name) for name in Frozen._fields])
        return QuantizedWeight.holding(frozen, context[0], tuple(size), context[1])

    def _stable_hash_for_caching(self) -> str:
        kinds = [None if t is None else (t.dtype, tuple(t.shape)) for t in self.frozen]
        return repr((str(self.scheme), self.dtype, tuple(self.shape), kinds))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter of a QuantizedWeight" if self._is_parameter else "QuantizedWeight"
        return f"{kind}({list(self.shape)}, {self.dtype}, {self.scheme}, device={self.device})"

    @property
    def _is_parameter(self) -> bool:
        return isinstance(self, nn.Parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            made = self.like(each(torch.clone, self.frozen))
            memo[id(self)] = as_parameter(made) if self._is_parameter else made
        return memo[id(self)]  # type: ignore[no-any-return]

    def share_memory_(self) -> QuantizedWeight:
        """Moves the tensors of this weight to memory that processes share, like
        `Tensor.share_memory_`."""
        each(Tensor.share_memory_, self.frozen)
        return self

    def is_shared(self) -> bool:
        """Whether the tensors of this weight are in memory that processes share."""
        return self.packed.is_shared()

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        own = PYTHON.get(func)
        if own is not None and isinstance(args[0], QuantizedWeight):
            return own(*args, **(kwargs or {}))
        with without_subclass():
            return func(*args, **(kwargs or {}))


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2 if dtype in FLOATS[1:] else 0.0


def _forms(frozen: Frozen) -> list[Any]:
    return [None if t is None else (t.shape, t.dtype, t.device) for t in frozen]


# Python functions with a special rule for such weights; `weight_attributes` fills this.
PYTHON: dict[Any, Callable[..., Any]] = {}
