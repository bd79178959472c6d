"""Handles PyTorch's distributed parts: weights that FSDP gathers, and sharding rules of DTensors.

FSDP gathers a weight again for each call, so nothing packed may outlive the call. It writes the
gathered value into the same parameter, at the same address, with the same version: the tensor
itself does not show that its value has changed. A model that has run compiled before it is sharded
keeps its graphs: `torch._dynamo.reset()` drops them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import TensorType, fx, nn


def gathered_weights(modules: Iterable[nn.Module]) -> Callable[[fx.Node], bool]:
    """Returns a function that says whether a graph input may be a weight that FSDP manages.
    `modules`: the modules around the captured graph.

    FSDP's hooks break the graph, so a managed module that is called is one whose method is running
    or compiled. For a weight that is used from outside its module, Dynamo's name leads through a
    managed module.
    """
    if any(map(_is_managed, modules)):
        return lambda weight: True
    return _held_by_managed


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP, of either version, manages the parameters of this module."""
    return _is_managed(module) or isinstance(module, _class("FullyShardedDataParallel"))


def _is_managed(module: nn.Module) -> bool:
    return isinstance(module, _class("FSDPModule"))


def _class(name: str) -> Any:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported already if FSDP is in use
    return getattr(fsdp, name, ())


def _held_by_managed(weight: fx.Node) -> bool:
    source = getattr(weight, "_dynamo_source", None)
    return source is not None and source.guard_source.is_fsdp_module()


def register_sharding_rule(operator: Any, rule: Callable[..., Any]) -> None:
    """Registers a rule like `torch.distributed.tensor.experimental.register_sharding`, for an
    operator whose result depends on its lists of integers. PyTorch caches the result of a rule by
    the shapes of tensors and by the arguments from the first integer on that is not in a list; this
    function makes the cache key include all arguments that are not tensors."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(operator)(rule)
    known: Any = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    kinds = [argument.type for argument in operator._schema.arguments]
    known[operator].static_argnum = next(
        i for i, kind in enumerate(kinds) if not TensorType.get().isSubtypeOf(kind)
    )
