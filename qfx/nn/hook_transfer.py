"""Transfers what users added to a linear to the module that replaces it, or says why it cannot.

Hooks on calls are transferred, and so are attributes, parameters, buffers and children that users
added. Each item that would be lost or become outdated gives a reason and what to do about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from qfx.host.modules import has_old_backward_hook, pre_hooks, registries, share_hooks, state_hooks
from qfx.nn.conv_like import CONVOLUTIONS, is_convolution, why_no_windows
from qfx.nn.experts_like import is_experts

_OWN_TENSORS = ("weight", "bias")
# Utilities that compute a parameter before each call: the class of the hook, name, how to end it.
_MAKERS: tuple[tuple[type, str, str], ...] = (
    (WeightNorm, "weight_norm", "torch.nn.utils.remove_weight_norm"),
    (SpectralNorm, "spectral_norm", "torch.nn.utils.remove_spectral_norm"),
    (BasePruningMethod, "pruning", "torch.nn.utils.prune.remove"),
)


def _not_of_user(linear: nn.Module) -> frozenset[str]:
    """Returns the names of the attributes and tensors that every module of this class has, so that
    no user added them. Experts are not made to find out: what is no method of theirs is theirs."""
    if is_experts(linear):
        added = {name for name in vars(linear) if hasattr(type(linear), name)} | {"_hf_hook"}
        return frozenset(vars(linear)).union(*registries(linear)) - added
    return _of_all(type(linear))  # type: ignore[arg-type]


@cache
def _of_all(kind: Any) -> frozenset[str]:
    with torch.device("meta"):  # takes no random numbers
        more = (0,) if issubclass(kind, nn.Embedding) else (1,) * issubclass(kind, CONVOLUTIONS)
        made = kind.blank() if hasattr(kind, "blank") else kind(1, 1, *more)
    return frozenset(vars(made)).union(*registries(made))


def transfer_hooks(linear: nn.Module, module: nn.Module) -> None:
    """Gives `module` the training mode of `linear` and all that users added to `linear`: hooks,
    attributes, tensors and children."""
    module.training = linear.training
    share_hooks(linear, module)
    for name, value in _own_attributes(linear).items():
        vars(module)[name] = value
    for of, to in zip(registries(linear), registries(module), strict=True):
        to.update({n: v for n, v in of.items() if n not in _not_of_user(linear)})


def obstacles(linear: nn.Module, names: Collection[str]) -> Iterator[str]:
    """Yields the reasons why no module can replace `linear`, and what to do about them.

    `names`: the names of the new module's attributes. A user may have added an attribute of such a
    name to `linear`. This is one of the reasons, because the added attribute would hide that of the
    new module.
    """
    yield from computed_weights(linear)
    yield from _own_methods(linear)
    if any(map(_of_user, state_hooks(linear))):
        yield "it has hooks on its state dict, which will have other keys: remove them"
    if has_old_backward_hook(linear):
        yield (
            "register_backward_hook gave it a hook, which sees the gradients of its own "
            "node: use register_full_backward_hook"
        )
    tensors = {n for r in registries(linear) for n in r} - _not_of_user(linear)
    for name in sorted({*_own_attributes(linear), *tensors} & {*names} - {*dir(type(linear))}):
        yield f"its attribute {name!r} would hide that of the module in its place: rename it"


def sizes(linear: Any, who: str) -> tuple[int, int]:
    """Returns K and N of the weight [N, K] of `linear`. Raises ValueError, with `who` in the
    message, if the weight cannot be taken over (see `computed_weights`)."""
    for reason in computed_weights(linear):
        raise ValueError(f"{who}: the linear cannot be taken over, {reason}")
    n, k = linear.weight.shape  # attributes may be older than the weight
    return k, n


def check_convolution(conv: nn.Module, who: str) -> None:
    """Raises ValueError, with `who` in the message, if the weight of `conv` cannot be taken over,
    or if it is no convolution of torch.nn that is a linear of windows."""
    if not is_convolution(conv):
        raise ValueError(f"{who}: {type(conv).__name__} is no convolution of torch.nn")
    for why in filter(None, (*computed_weights(conv), why_no_windows(conv))):
        raise ValueError(f"{who}: the convolution cannot be taken over, {why}")


def computed_weights(linear: nn.Module) -> Iterator[str]:
    """Yields the reasons why the parameters of `linear` cannot be taken over: another weight or
    bias is computed before each call, for example by a parametrization, or the weight is not [N,
    K]."""
    if is_experts(linear):
        return
    own = _OWN_TENSORS[:1] if isinstance(linear, nn.Embedding) else _OWN_TENSORS
    for name in own:
        if name not in linear._parameters:
            yield _computed(linear, name)
    weight, kernel = linear._parameters.get("weight"), _kernel(linear)
    if "weight" in linear._parameters and (weight is None or weight.dim() != 2 + len(kernel)):
        shape = None if weight is None else list(weight.shape)
        wanted = "".join(["[N, K", *(f", {size}" for size in kernel), "]"])
        yield f"its weight has shape {shape}, not {wanted}: let whoever shards it gather it first"


def _kernel(linear: nn.Module) -> tuple[int, ...]:
    """Returns the sizes of a kernel: none of a linear."""
    has_kernel = is_convolution(linear) or hasattr(type(linear), "kernel_size")
    return linear.kernel_size if has_kernel else ()  # type: ignore[return-value]


def _computed(linear: nn.Module, name: str) -> str:
    if parametrize.is_parametrized(linear, name):
        return parametrized(linear, name)
    for hook in pre_hooks(linear):
        of = getattr(hook, "name", getattr(hook, "_tensor_name", None))
        for kind, what, end in _MAKERS:
            if isinstance(hook, kind) and of == name:
                return f"{what} computes its {name} before each call: {end}(module, {name!r}) first"
    return (
        f"its {name} is no parameter but an attribute, which other code may compute before each "
        f"call: make it one, module.{name} = nn.Parameter(module.{name})"
    )


def parametrized(linear: nn.Module, name: str) -> str:
    """Returns a message that names the parametrizations of a tensor and how to remove them."""
    assert isinstance(linear.parametrizations, nn.ModuleDict)
    chain = linear.parametrizations[name]
    assert isinstance(chain, nn.ModuleList)
    by = ", ".join(type(each).__name__ for each in chain)
    end = f"torch.nn.utils.parametrize.remove_parametrizations(module, {name!r})"
    return f"its {name} is parametrized ({by}): {end} first"


def _of_user(hook: Any) -> bool:
    """Whether a user added the hook, and not torch.nn.utils, whose norms leave hooks behind when
    they are removed."""
    made_in = getattr(getattr(hook, "hook", hook), "__module__", "")
    return not made_in.startswith("torch.nn.utils.")


def _own_methods(linear: nn.Module) -> Iterator[str]:
    own = _own_attributes(linear)
    if "_hf_hook" in own and "forward" in own:
        yield (
            "accelerate has replaced its forward: accelerate.hooks.remove_hook_from_module(model, "
            "recurse=True) first, and dispatch or offload the model afterwards"
        )
        return
    for name, value in own.items():
        if hasattr(type(linear), name):
            kind = "nn.Linear" if type(linear) is nn.Linear else type(linear).__name__
            yield f"its {name} is its own, not that of {kind}: delete it, del module.{name}"
        elif isinstance(value, MethodType) and value.__self__ is linear:
            yield f"its attribute {name!r} is a method of it: delete it, del module.{name}"


def _is_plain(linear: nn.Module, name: str) -> bool:
    """Whether the attribute `name` of `linear` is only the method of its class again. The library
    accelerate leaves such a `forward` behind when its hooks are removed."""
    value = vars(linear)[name]
    bound = isinstance(value, MethodType) and value.__self__ is linear
    return bound and value.__func__ is getattr(type(linear), name, None)


def _own_attributes(linear: nn.Module) -> dict[str, Any]:
    own = {n: v for n, v in vars(linear).items() if n not in _not_of_user(linear)}
    return {n: v for n, v in own.items() if not _is_plain(linear, n)}
