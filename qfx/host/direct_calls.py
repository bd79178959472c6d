"""Calls of operators in the Python code that Inductor generates: by functions of `qfx._C` that take
addresses and sizes, instead of through the dispatcher, whose calls from Python take longer than a
linear of one short row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

import qfx._C as _C

DIGESTS: set[str] = set()  # of the code that generated calls fit to
LENGTH = 5  # numbers in a layout, and in a code
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # in the order of Dtype in csrc/types.h


class Call(Protocol):
    """A call of an operator in a graph of Inductor."""

    def runs_directly(self) -> bool:
        """Whether the operands are those for which the function, which checks none of them, is
        made."""

    def lowered(self) -> Any:
        """Returns the result in the graph."""


def register(operator: Any, calls: Callable[..., Call]) -> None:
    """Makes Inductor lower the operator by `calls`, a function of its arguments."""
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    through_dispatcher = fallback_handler(operator)

    def lower(*arguments: Any, **named: Any) -> Any:
        call = calls(*arguments, **named)
        plain = not V.graph.cpp_wrapper and not getattr(V.graph, "fx_wrapper", False)
        # Without a digest in the key, a cache could return code that an earlier version generated.
        keyed = any(digest in torch.compiler.config.cache_key_tag for digest in DIGESTS)
        if plain and keyed and call.runs_directly():
            return call.lowered()
        return through_dispatcher(*arguments, **named)

    register_lowering(operator, type_promotion_kind=None)(lower)


class Weight(NamedTuple):
    """A weight of a call, and what is done to its products."""

    weight: Any
    layout: Sequence[Any]
    bias: Any
    activation: str

    @property
    def tensors(self) -> list[Any]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def is_usual(self, groups: int = 1) -> bool:
        """`groups`: how many weights, in its rows, are for channels of their own."""
        unbiased = self.bias is None or is_vector(self.bias, FLOATS, groups * self.layout[0])
        return unbiased and self.weight.get_dtype() == torch.int8 and len(self.layout) == LENGTH

    def numbers(self) -> list[Any]:
        """Returns its numbers in the order in which csrc/api/call_arguments.h reads them."""
        return [
            self.weight.get_size()[-1],
            FLOATS.index(self.bias.get_dtype()) if self.bias is not None else -1,
            _C.activations.index(self.activation),
            *self.layout,
        ]


def direct_call(name: str, layout: Any, inputs: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """Returns the result of a call of `qfx._C.<name>`. `inputs` are in memory as they are read."""
    from torch._inductor.ir import TensorBox

    return TensorBox.create(_node()(name, layout, inputs, numbers))


def is_vector(tensor: Any, dtypes: Sequence[torch.dtype], size: Any = None) -> bool:
    """Whether a tensor of a graph has one axis, of `size` elements, and one of these dtypes."""
    from torch._inductor.virtualized import V

    sizes = tensor.get_size()
    known = V.graph.sizevars.statically_known_equals
    return (
        tensor.get_dtype() in dtypes and len(sizes) == 1 and (size is None or known(sizes[0], size))
    )


def on_cpu(tensors: Sequence[Any]) -> bool:
    """Whether all tensors of a graph are on the CPU."""
    return all(tensor.get_device().type == "cpu" for tensor in tensors)


def contiguous(tensors: Sequence[Any]) -> list[Any]:
    """Returns tensors of a graph in memory, without gaps."""
    from torch._inductor.ir import ExternKernel

    return [ExternKernel.require_contiguous(ExternKernel.realize_input(each)) for each in tensors]


@cache
def _node() -> Callable[..., Any]:
    from torch._inductor.ir import ExternKernelOut

    class DirectCall(ExternKernelOut):
        """A call of a function of `qfx._C`, imported in the code that contains it."""

        def __init__(
            self, name: str, layout: Any, inputs: Sequence[Any], numbers: Sequence[Any]
        ) -> None:
            super().__init__(layout, inputs, numbers, python_kernel_name=f"qfx_{name}")
            self.function = name

        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once(
                f"from qfx._C import {self.function} as {self.python_kernel_name}"
            )
            super().codegen(wrapper)

    return DirectCall
