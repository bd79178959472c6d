"""Convolutions in the Python code that Inductor generates: calls of `qfx._C.convolution`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from qfx.host.direct_calls import (
    DIGESTS,
    FLOATS,
    LENGTH,
    Weight,
    contiguous,
    direct_call,
    is_vector,
    on_cpu,
    register,
)

MOST_AXES = 3
Sizes = Sequence[int]


def call_convolutions_directly(digest: str) -> None:
    """Makes Inductor generate calls of `qfx._C.convolution` for qfx::conv_dynamic and
    qfx::conv_depthwise, as `call_linears_directly` does for linears."""
    DIGESTS.add(digest)
    _register_lowerings()


@cache
def _register_lowerings() -> None:
    register(torch.ops.qfx.conv_dynamic.default, _convolution)
    register(torch.ops.qfx.conv_depthwise.default, partial(_convolution, depthwise=True))


class _Convolution(NamedTuple):
    """The arguments of a convolution in a graph of Inductor. `windows`: kernel, stride, padding and
    dilation."""

    x: Any
    weight: Weight
    windows: Sequence[Sizes]
    code: Sizes
    out_dtype: torch.dtype
    factor: Any = None
    residual: Any = None
    depthwise: bool = False

    @property
    def groups(self) -> Any:
        rows = self.weight.weight.get_size()
        return rows[0] if len(rows) == 2 else 1

    @property
    def others(self) -> list[Any]:
        added = [each for each in (self.factor, self.residual) if each is not None]
        return [*self.weight.tensors, *added]

    def runs_directly(self) -> bool:
        return (
            on_cpu([self.x, *self.others])
            and self.x.get_dtype() in FLOATS
            and self.out_dtype in FLOATS
            and self._windows_are_usual()
            and len(self.weight.weight.get_size()) in (1, 2)
            and self.weight.is_usual(self.groups)
            and (self.factor is None or is_vector(self.factor, FLOATS[:1], self._features()))
            and (self.residual is None or self._is_like_the_output(self.residual))
            and len(self.code) == LENGTH
        )

    def _windows_are_usual(self) -> bool:
        axes = len(self.x.get_size()) - 2
        lengths = [len(each) for each in self.windows]
        return 1 <= axes <= MOST_AXES and lengths == [axes, axes, 2 * axes, axes]

    def _features(self) -> Any:
        """Returns the elements of a window in one group."""
        return math.prod(self.windows[0]) * self.x.get_size()[1] // self.groups

    def _is_like_the_output(self, tensor: Any) -> bool:
        from torch._inductor.ir import convert_shape_to_inductor
        from torch._inductor.virtualized import V

        node: Any = V.graph.current_node
        shape = convert_shape_to_inductor(node.meta["val"].shape)
        known = V.graph.sizevars.statically_known_list_equals
        return tensor.get_dtype() == self.out_dtype and known(tensor.get_size(), shape)

    def lowered(self) -> Any:
        from torch._inductor.ir import ExternKernel, FixedLayout, convert_shape_to_inductor
        from torch._inductor.virtualized import V

        node: Any = V.graph.current_node
        # As the graph was captured: channels last, where the operator reads them in place.
        strides = node.args[0].meta["val"].stride()
        x = ExternKernel.require_exact_strides(ExternKernel.realize_input(self.x), strides)
        shape = convert_shape_to_inductor(node.meta["val"].shape)
        layout = FixedLayout(self.x.get_device(), self.out_dtype, shape)
        numbers = self.numbers(x)
        return direct_call("convolution", layout, [x, *contiguous(self.others)], numbers)

    def numbers(self, x: Any) -> list[Any]:
        """Returns the numbers of the call in the order in which csrc/api/convolutions.cpp
        reads them."""
        return [
            int(self.depthwise),
            int(self.factor is not None),
            int(self.residual is not None),
            self.groups,
            FLOATS.index(x.get_dtype()),
            FLOATS.index(self.out_dtype),
            *self.code,
            *self.weight.numbers(),
            *x.get_size(),
            *x.get_stride(),
            *(number for each in self.windows for number in each),
            len(self.windows[0]),
        ]


def _convolution(
    x: Any,
    weight: Any,
    layout: Sizes,
    bias: Any,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    code: Sizes,
    activation: str,
    out_dtype: torch.dtype,
    factor: Any = None,
    residual: Any = None,
    *,
    depthwise: bool = False,
) -> _Convolution:
    by = Weight(weight, layout, bias, activation)
    windows = (kernel, stride, padding, dilation)
    return _Convolution(x, by, windows, code, out_dtype, factor, residual, depthwise)
