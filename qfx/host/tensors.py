"""Tensors without values, tensors that wrap others, and trees of tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeGuard

from torch import _C, Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

FakeMode: TypeAlias = FakeTensorMode
# Raised for operators whose result's size, or number of results, depends on values.
OF_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def is_fake(value: Any) -> TypeGuard[FakeTensor]:
    return isinstance(value, FakeTensor)


def has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def fake_mode_of(arguments: Sequence[Any]) -> FakeMode | None:
    """Returns the mode that made the fake tensors among the arguments, or the mode that tracing
    uses now; None if there is none."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(arguments)


def propagate_shapes(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Records at each node of the graph a fake tensor: the result of the node for these inputs."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)


def fake_mode() -> FakeMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_key(tensor: Tensor) -> int:
    """Returns a number that is the same for all tensors that share a storage, as long as one of
    them lives."""
    return StorageWeakRef(tensor.untyped_storage()).cdata  # type: ignore[no-any-return]


def symbolic_dispatch() -> AbstractContextManager[Any]:
    """Returns a context in which operators whose C++ code rejects symbolic sizes run their Python
    definitions."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def without_subclass() -> AbstractContextManager[Any]:
    """Returns a context in which operations on tensors of a subclass return plain tensors."""
    return _C.DisableTorchFunctionSubclass()


def wraps_tensors(tensor: Tensor) -> bool:
    """Whether a tensor is of a subclass that holds other tensors, such as DTensor and
    NestedTensor."""
    return is_traceable_wrapper_subclass(tensor)


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Imports nothing for this check."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def tree_leaves(tree: Any) -> list[Any]:
    """Returns the content of nested containers, in order."""
    return _pytree.tree_leaves(tree)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    return _pytree.tree_map(function, tree)


def version(tensor: Tensor) -> int:
    """Returns the number of in-place writes to a tensor that PyTorch has counted; 0 for inference
    tensors, which have no counter."""
    return 0 if tensor.is_inference() else tensor._version


def statically(condition: Any) -> bool:
    """Whether a condition on symbolic sizes holds for all sizes. Adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return condition if isinstance(condition, bool) else statically_known_true(condition)


def view_base(tensor: Tensor) -> Tensor:
    """Returns the tensor of which this one is a view, or this one itself."""
    return tensor if tensor._base is None else tensor._base


def storage_id(tensor: Tensor) -> int | None:
    """Returns a number that distinguishes living storages, or None for a tensor subclass without
    one."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return None


WeakStorage = StorageWeakRef


def weak_storage(tensor: Tensor) -> WeakStorage:
    """Returns a weak reference to a tensor's memory. The reference is `expired()` once nothing owns
    the memory. Until then no other memory has the same `storage_id`; later the number may be
    used again."""
    return StorageWeakRef(tensor.untyped_storage())


def owners(tensor: Tensor) -> int:
    """Returns the number of tensors that share the tensor's storage."""
    return int(_C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # without Python's


class Watching(TorchDispatchMode):
    """A mode that calls `see` with every operator before it runs."""

    def see(self, operator: Any, args: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see(func, args)
        return func(*args, **(kwargs or {}))


def watched() -> bool:
    """Whether a mode other than a default device intercepts calls."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def without_modes() -> AbstractContextManager[Any]:
    """Returns a context in which no mode intercepts calls: no mode for fake tensors, of Dynamo, or
    of the user."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()
