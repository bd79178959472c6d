"""Access to the private attributes in which nn.Module stores hooks and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_file

# Handles of hooks refer to these very dicts, so the dicts are transferred and not their content.
CALL_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def share_hooks(of: nn.Module, to: nn.Module) -> None:
    """Makes the module `to` share the call hooks of `of`, and the record of which buffers are not
    part of the state dict."""
    for name in CALL_HOOKS:
        setattr(to, name, getattr(of, name))
    to._non_persistent_buffers_set |= of._non_persistent_buffers_set


def state_hooks(module: nn.Module) -> Iterable[Any]:
    """Returns the hooks of a module on saving and loading its state dict."""
    return chain.from_iterable(getattr(module, name).values() for name in STATE_HOOKS)


def pre_hooks(module: nn.Module) -> Iterable[Any]:
    """Returns the hooks that run before each call."""
    return module._forward_pre_hooks.values()


def unsaved_buffers(module: nn.Module) -> Iterable[Tensor]:
    """Returns the module's own buffers that are not part of the state dict."""
    unsaved = (module._buffers[name] for name in module._non_persistent_buffers_set)
    return (buffer for buffer in unsaved if buffer is not None)


def forward_hooks(module: nn.Module) -> Iterable[Any]:
    """Returns the hooks that run before and after each call."""
    return chain(module._forward_pre_hooks.values(), module._forward_hooks.values())


def backward_hooks(module: nn.Module) -> Iterable[Any]:
    """Returns the hooks on the gradients of a module's calls."""
    return chain(module._backward_pre_hooks.values(), module._backward_hooks.values())


def is_watched(module: nn.Module) -> bool:
    """Whether hooks run with the calls of a module or their gradients."""
    return any(True for _ in chain(forward_hooks(module), backward_hooks(module)))


def global_hooks() -> int:
    """Returns the number of hooks on the calls of all modules."""
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    return sum(len(getattr(module_file, f"_global_{kind}_hooks")) for kind in kinds)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a hook runs before or after the module's calls."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def has_old_backward_hook(module: nn.Module) -> bool:
    """Whether the module has a hook from the deprecated `register_backward_hook` instead of
    `register_full_backward_hook`."""
    return bool(module._backward_hooks and not module._is_full_backward_hook)


def register_once(module: nn.Module, check: Callable[..., None]) -> None:
    """Registers `check` to run before the module's `load_state_dict`, unless it is registered
    already."""
    hooks = module._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is check for hook in hooks):
        module.register_load_state_dict_pre_hook(check)


def registries(module: nn.Module) -> Sequence[dict[str, Any]]:
    """Returns the module's parameters, buffers and children by name."""
    return module._parameters, module._buffers, module._modules
