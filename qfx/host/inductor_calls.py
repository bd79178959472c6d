"""Calls of operators in the Python code that Inductor generates: by a function of `qfx._C` that
takes addresses and sizes, instead of through the dispatcher, whose calls from Python take longer
than a linear of one short row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

import qfx._C as _C

DIGESTS: set[str] = set()  # of the code that generated calls fit to
LENGTH = 5  # numbers in a layout, and in a code
MOST_WEIGHTS = 64
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # in the order of Dtype in csrc/types.h


def call_linears_directly(digest: str) -> None:
    """Makes Inductor generate calls of `qfx._C.linears` for qfx::linear_dynamic and qfx::linears,
    if all their tensors are on the CPU and the keys of caches contain `digest`. Edits global state,
    but only adds lowerings of qfx's operators."""
    DIGESTS.add(digest)
    _register_lowerings()


@cache
def _register_lowerings() -> None:
    _register(torch.ops.qfx.linear_dynamic.default, _linear_dynamic, lambda found: found[0])
    _register(torch.ops.qfx.linears.default, _linears, list)


def _register(
    operator: Any, calls: Callable[..., _Linears], result: Callable[[list[Any]], Any]
) -> None:
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    through_dispatcher = fallback_handler(operator)

    def lower(*arguments: Any, **named: Any) -> Any:
        call = calls(*arguments, **named)
        plain = not V.graph.cpp_wrapper and not getattr(V.graph, "fx_wrapper", False)
        # Without a digest in the key, a cache could return code that an earlier version generated.
        keyed = any(digest in torch.compiler.config.cache_key_tag for digest in DIGESTS)
        if plain and keyed and call.runs_directly():
            return result(call.lowered())
        return through_dispatcher(*arguments, **named)

    register_lowering(operator, type_promotion_kind=None)(lower)


class _Weight(NamedTuple):
    """A weight of a call, and what is done to its products."""

    weight: Any
    layout: Sequence[Any]
    bias: Any
    activation: str

    @property
    def tensors(self) -> list[Any]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def is_usual(self) -> bool:
        unbiased = self.bias is None or _is_vector(self.bias, FLOATS, self.layout[0])
        return unbiased and _is_vector(self.weight, (torch.int8,)) and len(self.layout) == LENGTH

    def numbers(self) -> list[Any]:
        return [
            *self.weight.get_size(),
            FLOATS.index(self.bias.get_dtype()) if self.bias is not None else -1,
            _C.activations.index(self.activation),
            *self.layout,
        ]


class _Linears(NamedTuple):
    """The arguments of linears in a graph of Inductor."""

    x: Any
    weights: Sequence[_Weight]
    code: Sequence[int]
    out_dtype: torch.dtype
    factor: Any

    @property
    def tensors(self) -> list[Any]:
        own = [tensor for each in self.weights for tensor in each.tensors]
        return [self.x, *own] if self.factor is None else [self.x, *own, self.factor]

    def runs_directly(self) -> bool:
        """Whether the operands are those for which the function, which checks none of them, is
        made."""
        return (
            all(tensor.get_device().type == "cpu" for tensor in self.tensors)
            and self.x.get_dtype() in FLOATS
            and self.out_dtype in FLOATS
            and 0 < len(self.weights) <= MOST_WEIGHTS
            and all(each.is_usual() for each in self.weights)
            and (self.factor is None or _is_vector(self.factor, FLOATS[:1], self.x.get_size()[-1]))
            and len(self.code) == LENGTH
        )

    def lowered(self) -> list[Any]:
        """Returns the outputs, which lie one after the other in one buffer."""
        from torch._inductor.ir import ExternKernel, FixedLayout, TensorBox
        from torch._inductor.utils import sympy_product

        own = [ExternKernel.realize_input(tensor) for tensor in self.tensors]
        inputs = [ExternKernel.require_contiguous(tensor) for tensor in own]
        batch = self.x.get_size()[:-1]
        shapes = [[*batch, each.layout[0]] for each in self.weights]
        device, sizes = self.x.get_device(), [sympy_product(shape) for shape in shapes]
        whole = shapes[0] if len(shapes) == 1 else [sum(sizes)]
        y = TensorBox.create(
            _direct_call()(FixedLayout(device, self.out_dtype, whole), inputs, self.numbers())
        )
        return [y] if len(shapes) == 1 else _parts(y, shapes, sizes)

    def numbers(self) -> tuple[Any, ...]:
        """Returns the numbers of the call in the order in which csrc/generated_calls.cpp reads
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
    return _Linears(x, [_Weight(weight, layout, bias, activation)], code, out_dtype, factor)


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
    return _Linears(x, [_Weight(*given) for given in each], code, out_dtype, factor)


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


def _is_vector(tensor: Any, dtypes: Sequence[torch.dtype], size: Any = None) -> bool:
    from torch._inductor.virtualized import V

    sizes = tensor.get_size()
    known = V.graph.sizevars.statically_known_equals
    return (
        tensor.get_dtype() in dtypes and len(sizes) == 1 and (size is None or known(sizes[0], size))
    )


@cache
def _direct_call() -> Callable[..., Any]:
    from torch._inductor.ir import ExternKernelOut

    class DirectCall(ExternKernelOut):
        """A call of `qfx._C.linears`, imported in the code that contains it."""

        def __init__(self, layout: Any, inputs: Sequence[Any], numbers: Sequence[Any]) -> None:
            super().__init__(layout, inputs, numbers, python_kernel_name="qfx_linears")

        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once(f"from qfx._C import linears as {self.python_kernel_name}")
            super().codegen(wrapper)

    return DirectCall
