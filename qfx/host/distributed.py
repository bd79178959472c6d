"""Sharding rules with which PyTorch's distributed tensors pass through custom operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import TensorType


def register_sharding_rule(operator: Any, rule: Callable[..., Any]) -> None:
    """Registers a rule like `torch.distributed.tensor.experimental.register_sharding`, for an
    operator whose result depends on its lists of integers. PyTorch caches the result of a rule by
    the shapes of tensors and by the arguments from the first integer on that is not in a list; this
    function makes it include all arguments that are not tensors."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(operator)(rule)
    known: Any = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    kinds = [argument.type for argument in operator._schema.arguments]
    known[operator].static_argnum = next(
        i for i, kind in enumerate(kinds) if not TensorType.get().isSubtypeOf(kind)
    )
