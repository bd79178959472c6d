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
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # in the order of Dtype in csrc/types.h


def call_linears_directly(digest: str) -> None:
    """Makes Inductor generate calls of `qfx._C.linear_dynamic` for qfx::linear_dynamic, if all its
    tensors are on the CPU and the keys of caches contain `digest`. Edits global state, but only
    adds a lowering of qfx's operator."""
    DIGESTS.add(digest)
    _register_lowering()


@cache
def _register_lowering() -> None:
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    operator = torch.ops.qfx.linear_dynamic.default
    through_dispatcher = fallback_handler(operator)

    def lower(*arguments: Any, **named: Any) -> Any:
        call = _LinearCall(*arguments, **named)
        plain = not V.graph.cpp_wrapper and not getattr(V.graph, "fx_wrapper", False)
        # Without a digest in the key, a cache could return code that an earlier version generated.
        keyed = any(digest in torch.compiler.config.cache_key_tag for digest in DIGESTS)
        if plain and keyed and call.runs_directly():
            return call.lowered()
        return through_dispatcher(*arguments, **named)

    register_lowering(operator, type_promotion_kind=None)(lower)


class _LinearCall(NamedTuple):
    """The arguments of linear_dynamic in a graph of Inductor."""

    x: Any
    weight: Any
    layout: Sequence[Any]
    bias: Any
    code: Sequence[int]
    activation: str
    out_dtype: torch.dtype
    factor: Any = None

    @property
    def tensors(self) -> list[Any]:
        return [t for t in (self.x, self.weight, self.bias, self.factor) if t is not None]

    def runs_directly(self) -> bool:
        """Whether the operands are those for which the function, which checks none of them, is
        made."""
        return (
            all(tensor.get_device().type == "cpu" for tensor in self.tensors)
            and self.x.get_dtype() in FLOATS
            and self.out_dtype in FLOATS
            and _is_vector(self.weight, (torch.int8,))
            and (self.bias is None or _is_vector(self.bias, FLOATS, self.layout[0]))
            and (self.factor is None or _is_vector(self.factor, FLOATS[:1], self.x.get_size()[-1]))
            and len(self.layout) == len(self.code) == LENGTH
        )

    def lowered(self) -> Any:
        from torch._inductor.ir import ExternKernel, FixedLayout, TensorBox

        own = [ExternKernel.realize_input(tensor) for tensor in self.tensors]
        inputs = [ExternKernel.require_contiguous(tensor) for tensor in own]
        shape = [*self.x.get_size()[:-1], self.layout[0]]
        y = FixedLayout(self.x.get_device(), self.out_dtype, shape)
        return TensorBox.create(_direct_call()(y, inputs, self.numbers()))

    def numbers(self) -> tuple[Any, ...]:
        """Returns the numbers of the call in the order in which csrc/generated_calls.cpp reads
        them."""
        from torch._inductor.utils import sympy_product

        *batch, k = self.x.get_size()
        return (
            int(self.factor is not None),
            sympy_product(batch),
            k,
            *self.weight.get_size(),
            FLOATS.index(self.x.get_dtype()),
            FLOATS.index(self.bias.get_dtype()) if self.bias is not None else -1,
            FLOATS.index(self.out_dtype),
            _C.activations.index(self.activation),
            *self.layout,
            *self.code,
        )


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
        """A call of `qfx._C.linear_dynamic`, imported in the code that contains it."""

        def __init__(self, layout: Any, inputs: Sequence[Any], numbers: Sequence[Any]) -> None:
            name = "qfx_linear_dynamic"
            super().__init__(layout, inputs, numbers, python_kernel_name=name)

        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once(
                f"from qfx._C import linear_dynamic as {self.python_kernel_name}"
            )
            super().codegen(wrapper)

    return DirectCall
