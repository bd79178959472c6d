"""Autograd's dispatch, forward mode and recording of gradients; and autocast."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

Given = ParamSpec("Given")
Result = TypeVar("Result")

# These are called for every operator, so they are PyTorch's own and not wrapped in functions.
below_autograd: Any = torch._C._AutoDispatchBelowAutograd  # a context without autograd's kernels
_innermost_transform: Any = torch._C._functorch.peek_interpreter_stack
any_requires_grad: Any = torch._C._any_requires_grad  # whether any argument requires grad


def redispatch_below(op: Any, keyset: Any, arguments: Sequence[Any]) -> Any:
    """Calls the operator's kernel below autograd (the next one after its autograd kernel, from
    which this is called), with the dispatch keys `keyset` of the call."""
    with below_autograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active, so that tensors may be dual tensors."""
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) intercepts the current calls."""
    return not torch.compiler.is_compiling() and _innermost_transform() is not None


def in_compiled_backward() -> bool:
    """Whether the graph being compiled is a backward graph of compiled autograd."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled  # what `torch.no_grad` calls in a graph


def without_autocast(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Returns the function with autocast disabled, so that its CPU matmuls compute in the dtype of
    their operands, whatever the caller's autocast requests. torch.autocast itself used as a
    decorator is not thread-safe."""

    @wraps(function)
    def plain(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return plain


def saved_by(node: Any) -> list[Any]:
    """Returns the tensors that a node of autograd's graph saved, each through the hooks of
    `saved_tensors_hooks`: those of operators and those of `autograd.Function`."""
    if hasattr(node, "saved_tensors"):
        return [each for each in node.saved_tensors if each is not None]
    found = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    lists = [each if isinstance(each, list | tuple) else [each] for each in found]
    return [each for some in lists for each in some if isinstance(each, torch.Tensor)]


def short_name(node: Any) -> str:
    """Returns the name of the operator whose gradient a node computes: `Silu` for
    `SiluBackward0`, `qfx::rotate` for one of ours."""
    name = re.sub(r"Backward\d*$", "", node.name())
    return re.sub(r"^BackwardOf_", "qfx::", name)


def saving_values() -> AbstractContextManager[Any]:
    """Returns a context in which autograd saves tensors as they are, also under hooks of others,
    such as those of `torch.utils.checkpoint`: for gradients that are computed at once."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
