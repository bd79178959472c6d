"""Tensor subclasses that contain other tensors: creation, conversion and the arguments of
operators."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qfx.host.tensors import without_subclass

Kind = TypeVar("Kind", bound=Tensor)

NO_TORCH_FUNCTION: Any = (
    torch._C._disabled_torch_function_impl
)  # as `__torch_function__`: turns it off
PIN_MEMORY: Any = torch.ops.aten._pin_memory.default
keeping_version: Any = torch.autograd._unsafe_preserve_version_counter  # leaves its version
SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


def wrapper(
    kind: type[Kind],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
    offset: Any = None,
) -> Kind:
    """Returns a tensor of the subclass without memory of its own. C++ code that requests its
    address gets an error instead of a null pointer."""
    made: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        kind, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made  # type: ignore[no-any-return]


def as_parameter(tensor: Tensor) -> nn.Parameter:
    """Makes a tensor of a subclass a parameter that does not train, and returns the same object.
    `nn.Parameter(tensor)` would make an alias instead, by an operator for which PyTorch imports its
    distributed tensors."""
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def become(tensor: Tensor, other: Tensor) -> bool:
    """Gives the object `tensor` the shape, dtype and data of `other`, but not its Python
    attributes. Returns False if this is impossible, for example if they are on different kinds of
    devices."""
    if not torch._has_compatible_shallow_copy_type(tensor, other):  # type: ignore[attr-defined]
        return False
    with without_subclass():
        SET_DATA(tensor, other)
    return True


def as_made_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which aliases of `tensor` can be created. It leaves inference mode if
    the tensor was created outside of inference mode: PyTorch could not create aliases of such a
    tensor inside."""
    apart = torch.is_inference_mode_enabled() and not tensor.is_inference()
    return torch.inference_mode(False) if apart else nullcontext()


def decomposed(operator: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Computes an operator that is composed of others, such as matmul, by calling these; returns
    NotImplemented for any other operator."""
    return operator.decompose(*args, **kwargs)
