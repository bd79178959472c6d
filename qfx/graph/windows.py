"""The windows of a convolution as views: of the image, of the kernels, and of the result.

A window that overlaps its neighbours, or that lies partly outside of the image, is read by the
operator `im2col`; others are views of the image. A transposed convolution is the product of windows
and of the phases of its kernels. (C1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from qfx.graph.views import Step, View


@dataclass(frozen=True)
class WindowSetting:
    """The settings of a convolution, one number for each axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # before and after
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """Whether windows do not overlap and lie in the image."""
        whole = all(side == (0, 0) for side in self.padding)
        gaps = any(d != 1 and k != 1 for d, k in zip(self.dilation, self.kernel, strict=True))
        apart = all(s >= k for s, k in zip(self.stride, self.kernel, strict=True))
        return whole and apart and not gaps


class WindowViews(NamedTuple):
    """A convolution as a linear. `x`: the view of the image [B, C, *sizes] as rows [B, *q, K].
    `weight`: the view of the kernels as a matrix [N, K]. `bias`: the view of the bias as one of N
    elements. `result`: the view of the result [B, *q, N] as [B, *outputs, channels]."""

    x: View
    weight: View
    bias: View = ()
    result: View = ()


def window_views(setting: WindowSetting, groups: int = 1) -> WindowViews:
    """Returns the views of a convolution. Those of several groups of channels have the channels
    after the taps, whatever the windows."""
    if setting.plain and groups == 1:
        return WindowViews(_blocks(setting), (("flatten", (1,)),))
    x = _im2col(setting.kernel, setting.stride, setting.padding, setting.dilation)
    return WindowViews(x, (("movedim", (1, -1)), ("flatten", (1,))))


def transposed_views(setting: WindowSetting) -> WindowViews | str:
    """Returns the views of a transposed convolution (C3), or the reason why there are none.

    Along an axis of stride s, outputs s q + r, r = 0 .. s - 1, read the same inputs, q and those
    before it, each with other taps of the kernel. So they are one row of a matmul of windows, whose
    weight has N = s * channels rows for each axis."""
    if any(d != 1 for d in setting.dilation):
        return "a dilated transposed convolution"
    phases = [_Phases.of(setting, i) for i in range(len(setting.kernel))]
    if any(axis.after < 0 for axis in phases):
        return "a transposed convolution with more padding than its kernel covers"
    ones = (1,) * len(phases)
    around = tuple((axis.before, axis.after) for axis in phases)
    x = _im2col(tuple(axis.taps for axis in phases), ones, around, ones)
    count = math.prod(setting.stride)
    bias: View = (("repeat", ((count,),)),) if count > 1 else ()
    return WindowViews(x, _phase_weights(setting, phases), bias, _interleaved(setting, phases))


def each_axis(given: Any, count: int) -> tuple[Any, ...]:
    values = tuple(given) if isinstance(given, list | tuple) else (given,)
    return values * count if len(values) == 1 else values


def padding_of(
    given: Any, kernel: tuple[int, ...], dilation: tuple[Any, ...]
) -> tuple[tuple[Any, Any], ...]:
    """Returns the zeros before and after each axis; those of "same" may differ by one."""
    if given == "same":
        around = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((n // 2, n - n // 2) for n in around)
    each = each_axis(0 if given == "valid" else given, len(kernel))
    return tuple((n, n) for n in each)


def _blocks(setting: WindowSetting) -> View:
    """Returns the view [B, C, *sizes] -> [B, *outputs, C * kernel] of windows that do not
    overlap."""
    kernel, stride, spatial = setting.kernel, setting.stride, len(setting.kernel)
    if all(n == 1 for n in kernel):
        kept = tuple(("slice", (2 + i, 0, _END, s)) for i, s in enumerate(stride) if s > 1)
        return (*kept, ("movedim", (1, -1)))
    cut = tuple(("unfold", (2 + i, kernel[i], stride[i])) for i in range(spatial))
    places = (0, *range(2, 2 + spatial), 1, *range(2 + spatial, 2 + 2 * spatial))
    return (*cut, ("permute", (places,)), ("flatten", (1 + spatial, -1)))


def _im2col(
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
) -> View:
    """Returns the view [B, C, *sizes] -> [B, *outputs, taps * C]."""
    around = tuple(n for side in padding for n in side)
    return (("im2col", (kernel, stride, around, dilation)),)


@dataclass(frozen=True)
class _Phases:
    """The outputs of one axis of a transposed convolution: each reads `taps` inputs, with zeros
    before and after the image. Of the outputs that are computed, those from `begin` on are wanted,
    without the last `drop`."""

    taps: int
    before: int
    after: int
    begin: int
    drop: int

    @classmethod
    def of(cls, setting: WindowSetting, axis: int) -> _Phases:
        k, s, (p, _) = setting.kernel[axis], setting.stride[axis], setting.padding[axis]
        taps = -(-k // s)
        skipped = min(p // s, taps - 1)
        end = k - p + setting.output_padding[axis] - s  # of the outputs, from s * inputs on
        after = -(-end // s)
        return cls(taps, taps - 1 - skipped, after, p - s * skipped, s * after - end)


def _interleaved(setting: WindowSetting, phases: list[_Phases]) -> View:
    """Returns the view [B, *q, phases * channels] -> [B, *outputs, channels]."""
    axes, view = len(phases), list[Step]()
    if any(s > 1 for s in setting.stride):
        channels = 1 + 2 * axes
        order = (0, *(place for i in range(axes) for place in (1 + i, 1 + axes + i)), channels)
        view += [("unflatten", (-1, (*setting.stride, -1)))]
        view += [("permute", (order,))] if axes > 1 else []
        view += [("flatten", (1 + i, 2 + i)) for i in range(axes)]
    for i, axis in enumerate(phases):
        if axis.begin or axis.drop:
            view.append(("slice", (1 + i, axis.begin, -axis.drop if axis.drop else _END)))
    return tuple(view)


_END = 2**63 - 1  # of any axis


def _phase_weights(setting: WindowSetting, phases: list[_Phases]) -> View:
    """Returns the view [C, channels, *kernel] -> [phases * channels, taps * C]."""
    axes, view = len(phases), list[Step]()
    more = [
        axis.taps * s - k for axis, s, k in zip(phases, setting.stride, setting.kernel, strict=True)
    ]
    if any(more):
        view.append(("constant_pad_nd", (tuple(n for m in reversed(more) for n in (0, m)),)))
    for i, (axis, s) in enumerate(zip(phases, setting.stride, strict=True)):
        view.append(("unflatten", (2 + 2 * i, (axis.taps, s))))
    places = range(axes)
    view.append(("flip", (tuple(2 + 2 * i for i in places),)))
    order = (*(3 + 2 * i for i in places), 1, *(2 + 2 * i for i in places), 0)
    return (*view, ("permute", (order,)), ("flatten", (0, axes)), ("flatten", (1, -1)))
