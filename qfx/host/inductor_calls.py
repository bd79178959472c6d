"""Linears in the Python code that Inductor generates: calls of `qfx._C.linears`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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

MOST_WEIGHTS = 64


def call_linears_directly(digest: str) -> None:
    """Makes Inductor generate calls of `qfx._C.linears` for qfx::linear_dynamic and qfx::linears,
    if all their tensors are on the CPU and the keys of caches contain `digest`. Edits global state,
    but only adds lowerings of qfx's operators."""
    DIGESTS.add(digest)
    _register_lowerings()


@cache
def _register_lowerings() -> None:
    register(torch.ops.qfx.linear_dynamic.default, _linear_dynamic)
    register(torch.ops.qfx.linears.default, _linears)


class _Linears(NamedTuple):
    """The arguments of linears in a graph of Inductor."""

    x: Any
    weights: Sequence[Weight]
    code: Sequence[int]
    out_dtype: torch.dtype
    factor: Any
    single: bool = False  # one output, and no list of such

    @property
    def tensors(self) -> list[Any]:
        own = [tensor for each in self.weights for tensor in each.tensors]
        return [self.x, *own] if self.factor is None else [self.x, *own, self.factor]

    def runs_directly(self) -> bool:
        return (
            on_cpu(self.tensors)
            and self.x.get_dtype() in FLOATS
            and self.out_dtype in FLOATS
            and 0 < len(self.weights) <= MOST_WEIGHTS
            and all(each.is_usual() and len(each.weight.get_size()) == 1 for each in self.weights)
            and (self.factor is None or is_vector(self.factor, FLOATS[:1], self.x.get_size()[-1]))
            and len(self.code) == LENGTH
        )

    def lowered(self) -> Any:
        """Returns the output, or outputs which lie one after the other in one buffer."""
        from torch._inductor.ir import FixedLayout
        from torch._inductor.utils import sympy_product

        batch = self.x.get_size()[:-1]
        shapes = [[*batch, each.layout[0]] for each in self.weights]
        device, sizes = self.x.get_device(), [sympy_product(shape) for shape in shapes]
        whole = shapes[0] if len(shapes) == 1 else [sum(sizes)]
        layout = FixedLayout(device, self.out_dtype, whole)
        y = direct_call("linears", layout, contiguous(self.tensors), self.numbers())
        if self.single:
            return y
        return [y] if len(shapes) == 1 else _parts(y, shapes, sizes)

    def numbers(self) -> tuple[Any, ...]:
        """Returns the numbers of the call in the order in which csrc/api/linears.cpp reads
        them."""
        from torch._inductor.utils import sympy_product

        *batch, k = self.x.get_size()
        return (
            int(self.factor is not None),
            sympy_product(batch),
            k,
            FLOATS.index(self.x.get_dtype()),
            FLOATS.index(self.out_dtype),
            *self.code,
            *(number for each in self.weights for number in each.numbers()),
            len(self.weights),
        )


def _linear_dynamic(
    x: Any,
    weight: Any,
    layout: Sequence[Any],
    bias: Any,
    code: Sequence[int],
    activation: str,
    out_dtype: torch.dtype,
    factor: Any = None,
) -> _Linears:
    only = Weight(weight, layout, bias, activation)
    return _Linears(x, [only], code, out_dtype, factor, single=True)


def _linears(
    x: Any,
    weight: Sequence[Any],
    layout: Sequence[Any],
    bias: Sequence[Any],
    code: Sequence[int],
    activation: Sequence[str],
    out_dtype: torch.dtype,
    factor: Any = None,
) -> _Linears:
    layouts = [layout[i : i + LENGTH] for i in range(0, len(layout), LENGTH)]
    each = zip(weight, layouts, bias, activation, strict=True)
    return _Linears(x, [Weight(*given) for given in each], code, out_dtype, factor)


def _parts(y: Any, shapes: Sequence[Sequence[Any]], sizes: Sequence[Any]) -> list[Any]:
    """Returns views of these shapes of a buffer in which they lie one after the other."""
    from torch._inductor.ir import FixedLayout, FlexibleLayout, ReinterpretView, TensorBox

    found, begin = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        strides = FlexibleLayout.contiguous_strides(shape)
        layout = FixedLayout(y.get_device(), y.get_dtype(), shape, strides, begin)
        found.append(TensorBox(ReinterpretView(data=y.data, layout=layout)))
        begin = begin + size
    return found
