"""Weights that FSDP gathers anew for each call, so that nothing packed may outlive the call.

FSDP writes the gathered value into the same parameter, at the same address, under the same version:
nothing about the tensor tells two of its values apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import fx, nn

from qfx import frame
from qfx.capture import roots
from qfx.match import Site


def gathered_weights() -> Callable[[Site], bool]:
    """Whether a site of the graph that is being compiled has a weight that FSDP may manage.

    It may if the compiled frame names a managed module, or one is running: FSDP's hooks break the
    graph, so that a managed module which is called is one of those. Else Dynamo's name of a weight
    that is used from outside tells.
    """
    if any(map(_managed, frame.modules())):
        return lambda site: True
    return lambda site: any(map(_held_by_managed, roots(site.weight)))


def _managed(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever uses it has imported it
    marked = getattr(module, "_is_fsdp_managed_module", False)
    return marked or isinstance(module, getattr(fsdp, "FSDPModule", ()))


def _held_by_managed(weight: fx.Node) -> bool:
    source = getattr(weight, "_dynamo_source", None)
    return source is not None and source.guard_source.is_fsdp_module()
