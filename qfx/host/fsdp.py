"""Weights that FSDP gathers anew for each call, so that nothing packed may outlive the call.

FSDP writes the gathered value into the same parameter, at the same address, under the same version:
nothing about the tensor tells two of its values apart. A model that has run compiled before it is
sharded keeps its graphs: `torch._dynamo.reset()` drops them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx, nn


def gathered_weights(modules: Iterable[nn.Module]) -> Callable[[fx.Node], bool]:
    """Whether an input of a graph that was captured with these modules around it is a weight that
    FSDP may manage.

    Its hooks break the graph, so a managed module that is called is one whose method is running or
    compiled. Of a weight that is used from outside, Dynamo's name leads through a managed module.
    """
    if any(map(_is_managed, modules)):
        return lambda weight: True
    return _held_by_managed


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP, of either version, keeps account of the parameters of this module."""
    return _is_managed(module) or isinstance(module, _class("FullyShardedDataParallel"))


def _is_managed(module: nn.Module) -> bool:
    return isinstance(module, _class("FSDPModule"))


def _class(name: str) -> Any:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever uses it has imported it
    return getattr(fsdp, name, ())


def _held_by_managed(weight: fx.Node) -> bool:
    source = getattr(weight, "_dynamo_source", None)
    return source is not None and source.guard_source.is_fsdp_module()
