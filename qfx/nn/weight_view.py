"""WeightView: a view of a quantized weight, such as its transpose or some of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.host.subclasses import wrapper
from qfx.host.tensors import has_values
from qfx.nn.float_proxy import FloatProxy, ViewCall
from qfx.nn.sharded_weight import refuse_padding

aten = torch.ops.aten


class WeightRegion(NamedTuple):
    """Rows and columns of a weight [N, K], each as (begin, end), and whether they are then
    transposed."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    transposed: bool = False


class WeightView(FloatProxy):
    """A view of a quantized weight: the weight `base`, and the view calls that are applied to its
    floats.

    Reading it computes the floats of the whole weight. Writing to it writes the whole weight.
    """

    base: FloatProxy
    steps: tuple[ViewCall, ...]

    @staticmethod
    def __new__(cls, base: FloatProxy, steps: tuple[ViewCall, ...], like: Tensor) -> WeightView:
        """Creates a view of `base`. `like`: a tensor with the shape, strides, offset and dtype of
        the view."""
        place = like.stride(), like.storage_offset()
        view = wrapper(cls, like.shape, like.dtype, base.device, *place)
        view.base, view.steps = base, steps
        return view

    __init__ = object.__init__  # type: ignore[assignment]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Implements `FloatProxy.dequantize`."""
        whole = self.base.dequantize(dtype if self.dtype == self.base.dtype else None)
        return self._of(whole).to(dtype or self.dtype)

    def write(self, value: Tensor) -> None:
        """Implements `FloatProxy.write`."""
        whole = self.base.dequantize(value.dtype if self.dtype == self.base.dtype else None)
        self._of(whole).copy_(value)
        self.base.write(whole)

    def _of(self, whole: Tensor) -> Tensor:
        for step in self.steps:
            whole = step.of(whole)
        return whole

    def alias(self) -> WeightView:
        """Implements `FloatProxy.alias`."""
        return WeightView(self.base, self.steps, self)

    def viewed(self, taken: ViewCall, like: Tensor) -> WeightView:
        """Implements `FloatProxy.viewed`."""
        return WeightView(self.base, (*self.steps, taken), like)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """Raises ValueError: rows that FSDP has padded are not a separate weight."""
        refuse_padding(mesh, outer_size)

    def fsdp_post_all_gather(self, *_: Any, **__: Any) -> Any:
        """Is never called, because nothing was gathered."""
        raise NotImplementedError

    def without_batches(self) -> WeightView:
        """Returns the matrix [K, N] that all matrices [.., K, N] of this view are equal to; the
        view itself if they may differ."""
        first = next((i for i, s in enumerate(self.steps) if s.func is aten.expand.default), None)
        sizes, strides = self.shape[:-2], self.stride()[:-2]
        alike = all(n == 1 or stride == 0 for n, stride in zip(sizes, strides, strict=True))
        if first is None or not alike:
            return self
        shape, strides = self.shape[-2:], self.stride()[-2:]
        like = torch.empty_strided(shape, strides, dtype=self.dtype, device="meta")
        return WeightView(self.base, self.steps[:first], like)

    def region(self) -> WeightRegion | None:
        """Returns the region of the weight that this view shows, or None if it is not rows and
        columns of it."""
        found = [(0, self.base.shape[0]), (0, self.base.shape[1])]
        turned = False
        for step in self.steps:
            if _turns(step):
                turned = not turned
            elif (cut := _cut(step, found, turned)) is not None:
                axis, begin, end = cut
                low, high = found[axis]
                found[axis] = (low + _within(begin, high - low), low + _within(end, high - low))
            else:
                return None
        return WeightRegion(found[0], found[1], turned)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        geometry = tuple(self.shape), tuple(self.stride()), self.storage_offset(), self.dtype
        return ["base"], (self.steps, *geometry)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> WeightView:
        steps, *_, offset, dtype = context
        room = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
        like = torch.empty(room, dtype=dtype, device="meta").as_strided(size, stride, offset)
        return WeightView(inner["base"], steps, like)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if not has_values(self):
            return f"WeightView({list(self.shape)} of {self.base!r})"
        return f"WeightView({self.dequantize()}, of {self.base!r})"

    # --- methods of PyTorch that use the memory of a tensor ---

    def share_memory_(self) -> WeightView:
        """Moves the whole weight to memory that processes share."""
        self.base.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether processes share the whole weight."""
        return self.base.is_shared()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().__reduce_ex__(protocol)  # floats, as a view has no codes

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def numpy(self, **_: Any) -> Any:
        """Raises RuntimeError, as for the whole weight."""
        what = f"{list(self.shape)} of {self.base!r}"
        raise RuntimeError(f"{what} has no floats in memory: view.dequantize() makes them")


def _turns(step: ViewCall) -> bool:
    if step.func is aten.transpose.int:
        return {each % 2 for each in step.args} == {0, 1}
    return step.func in (aten.t.default, aten.numpy_T.default) or (
        step.func is aten.permute.default and [each % 2 for each in step.args[0]] == [1, 0]
    )


def _cut(
    step: ViewCall, found: Sequence[tuple[int, int]], turned: bool
) -> tuple[int, int, int | None] | None:
    """Returns the axis of the weight that a step cuts, and the begin and end of the cut; None if
    the step is not a cut."""
    given = dict(zip(("dim", "start", "end", "step"), step.args, strict=False))
    if step.func is aten.slice.Tensor and given.get("step", 1) == 1:
        axis = (given.get("dim", 0) % 2) ^ turned
        return axis, given.get("start") or 0, given.get("end")
    if step.func in (aten.split.Tensor, aten.split_with_sizes.default):
        dim = step.args[1] if len(step.args) > 1 else step.kwargs.get("dim", 0)
        axis, place, sizes = (dim % 2) ^ turned, step.place or 0, step.args[0]
        if isinstance(sizes, int):
            return axis, place * sizes, (place + 1) * sizes
        return axis, sum(sizes[:place]), sum(sizes[: place + 1])
    if step.func is aten.narrow.default:
        dim, start, length = step.args
        start = _within(start, found[(dim % 2) ^ turned][1] - found[(dim % 2) ^ turned][0])
        return (dim % 2) ^ turned, start, start + length
    return None


def _within(number: int | None, size: int) -> int:
    """Returns an index within `size`; negative numbers count from the end, and None is the end."""
    if number is None:
        return size
    return min(max(number + size if number < 0 else number, 0), size)
