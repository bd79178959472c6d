"""Rules by which PyTorch's distributed tensors go through operators that it does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import TensorType


def register_sharding_rule(operator: Any, rule: Callable[..., Any]) -> None:
    """Registers the rule, as `torch.distributed.tensor.experimental.register_sharding` does, of an
    operator whose lists of integers matter to it: PyTorch remembers what a rule said by the shapes
    of tensors and by what follows its first integer that is no list."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(operator)(rule)
    known: Any = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    kinds = [argument.type for argument in operator._schema.arguments]
    known[operator].static_argnum = next(
        i for i, kind in enumerate(kinds) if not TensorType.get().isSubtypeOf(kind)
    )
