"""QuantizedWeight: a weight that is int8 codes in memory and a tensor of floats to all else."""

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
from qfx.values.floats import FLOATS
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe

_HELD = ("memory", "scheme", "how")


class Memory:
    """Memory that the aliases of a weight share: its tensors, `names` of those that are there, and
    the codes from before its last writes, which are restored where those are taken back. (Q13)

    `has_scales_of_whole`: whether these are some columns of a larger weight and have its scales,
    as before they are written.
    """

    def __init__(self, frozen: Frozen, has_scales_of_whole: bool = False) -> None:
        self.earlier: tuple[PreviousWeight, ...] = ()
        self.has_scales_of_whole = has_scales_of_whole
        self.hold(frozen)

    def hold(self, frozen: Frozen) -> None:
        """Has these tensors from now on."""
        self.frozen = frozen
        held = zip(Frozen._fields, frozen, strict=True)
        self.names = [name for name, tensor in held if tensor is not None]


class QuantizedWeight(ShardedWeight, FloatProxy):
    """A weight [N, K] of a float type, whose memory holds a packed quantized weight.

    What reads it computes with the floats that the codes stand for. What writes to it, or to a view
    of it, quantizes the result into the same memory, so that small changes are not lost and one
    that is taken back restores the codes of before (Q13). `F.linear(x, weight, bias)`, and the
    products that it becomes under autograd, run int8 kernels. It does not train.

    `scheme`: how it and its input are quantized, with the rotation in use.
    """

    scheme: Scheme
    how: Prepared
    memory: Memory

    @staticmethod
    def __new__(
        cls, weight: Tensor, requires_grad: bool = False, **attributes: Any
    ) -> QuantizedWeight:
        """As of a class of parameters: the quantized weight itself, or floats [N, K] quantized.
        `attributes` of the weight may be given, and are those that it has.

        Raises ValueError for one on the meta device, which accelerate makes of a weight that it
        wants to look up in the state dict later, and not find there.
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
        """`frozen`: of a weight of this shape [N, K], as `freeze` returns it with its scheme."""
        return cls._made(Memory(frozen), scheme, shape, dtype)

    @classmethod
    def _made(
        cls, memory: Memory, scheme: Scheme, shape: Sequence[int], dtype: torch.dtype
    ) -> QuantizedWeight:
        weight = wrapper(cls, shape, dtype, memory.frozen.packed.device)
        weight.memory, weight.scheme, weight.how = memory, scheme, prepared(scheme, int(shape[0]))
        return weight

    @classmethod
    def of(cls, weight: Tensor, how: Scheme | SiteRecipe | None = None) -> QuantizedWeight:
        """The weight [N, K] quantized; `qfx.Scheme()` by default. Raises ValueError for a scheme
        that needs a recipe, and for a recipe of another shape or weight."""
        scheme, frozen = freeze(weight.detach(), how or Scheme())
        return cls.holding(frozen, scheme, weight.shape, weight.dtype)

    @property
    def frozen(self) -> Frozen:
        """The packed weight and the numbers that its input is quantized with."""
        return self.memory.frozen

    @property
    def unpacked(self) -> Values:
        """Codes, scales and zero points, unpacked, in no layout of a processor."""
        return values_of(self.packed, self.scheme.w, self.scheme.group, *self.shape)

    @property
    def packed(self) -> Tensor:
        """The packed weight: bytes as the kernels read them."""
        return self.memory.frozen.packed

    @property
    def factor(self) -> Tensor | None:
        """float32 [K], which multiplies x, where the scheme has one."""
        return self.memory.frozen.factor

    @property
    def x_scale(self) -> Tensor | None:
        """float32 [1], the static scale of activations, where the scheme has one."""
        return self.memory.frozen.x_scale

    @property
    def x_zero_point(self) -> Tensor | None:
        """int32 [1], of activations with a static scale."""
        return self.memory.frozen.x_zero_point

    @property
    def shift(self) -> Tensor | None:
        """float32 [K], learned, which is added to x first."""
        return self.memory.frozen.shift

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of its memory."""
        return sum(t.nbytes for t in self.frozen if t is not None)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[N, K], the weight that multiplies x itself, in its type or in `dtype`. (R1)"""
        n, k = self.shape
        return float_weight(self.frozen, self.scheme, n, k).to(dtype or self.dtype)

    def settle(self) -> None:
        """Forgets the codes from before writes, as of a model that was merged for good."""
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
        """Holds the nearest codes of `value` [N, K], as of a weight that is loaded. (R1)"""
        n, k = self.shape
        check_written(value, n, k, self.packed)
        self.memory.has_scales_of_whole = False
        self._hold(nearest(value, self.frozen, self.scheme))
        self.settle()

    def _hold(self, made: Frozen) -> None:
        if not self.store(made):
            self.memory.hold(made)

    def _widened(self, value: Tensor) -> Tensor:
        """float32, in which elements that were only rounded to a narrow type are what they were."""
        if value.dtype == torch.float32:
            return value
        wide = self.dequantize(torch.float32)
        return torch.where(value == wide.to(value.dtype), wide, value.float())

    def store(self, made: Frozen) -> bool:
        """Copies the tensors of `made` into those of this weight, if they are of the same types and
        shapes; returns whether they are."""
        if _forms(self.frozen) != _forms(made):
            return False
        for mine, its in zip(self.frozen, made, strict=True):
            if mine is not None and its is not None and mine is not its:
                mine.copy_(its)
                if not mine.is_inference():  # below autograd nothing counts
                    torch.autograd.graph.increment_version(mine)
        return True

    @torch.no_grad()
    def load(self, other: QuantizedWeight, assign: bool = False) -> bool:
        """Takes over what `other` is, of another scheme too: its very tensors with `assign` or
        where the memory here is of another form, else their numbers. Returns False where it cannot,
        as `become`."""
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
        """Is from now on what `other` is, its type too, for whoever refers to it. Returns False
        where it cannot, as on another kind of device."""
        if not become(self, other):
            return False
        vars(self).update({name: vars(other)[name] for name in _HELD})
        return True

    def alias(self) -> QuantizedWeight:
        """See `FloatProxy`."""
        return self._made(self.memory, self.scheme, self.shape, self.dtype)

    def viewed(self, taken: ViewCall, like: Tensor) -> WeightView:
        """See `FloatProxy`."""
        return WeightView(self, (taken,), like)

    def like(self, frozen: Frozen, dtype: torch.dtype | None = None) -> QuantizedWeight:
        """Another weight of this shape and scheme, that holds `frozen`, the same numbers."""
        memory = Memory(frozen, self.memory.has_scales_of_whole)
        return self._made(memory, self.scheme, self.shape, dtype or self.dtype)

    def cut(self, rows: tuple[int, int], columns: tuple[int, int]) -> QuantizedWeight | None:
        """A weight of its own, of these rows and columns, with the same codes; None where columns
        are parted within a group or a block that is rotated."""
        made = cut(self.frozen, self.scheme, tuple(self.shape), rows, columns)
        shape = (rows[1] - rows[0], columns[1] - columns[0])
        if made is None:
            return None
        return self._made(Memory(made, True), self.scheme, shape, self.dtype)

    # --- what knows of such tensors: tracing, copying, other processes ---

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self.memory.names, (self.scheme, self.dtype)  # at each call of a compiled graph

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> QuantizedWeight:
        frozen = Frozen(*[inner.get(name) for name in Frozen._fields])
        return QuantizedWeight.holding(frozen, context[0], tuple(size), context[1])

    def _stable_hash_for_caching(self) -> str:
        held = [None if t is None else (t.dtype, tuple(t.shape)) for t in self.frozen]
        return repr((str(self.scheme), self.dtype, tuple(self.shape), held))

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
        """As of any tensor: moves its memory to where processes share it."""
        each(Tensor.share_memory_, self.frozen)
        return self

    def is_shared(self) -> bool:
        """Whether processes share its memory."""
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


# Functions of Python that have a rule of their own for such weights: `weight_attributes`.
PYTHON: dict[Any, Callable[..., Any]] = {}
