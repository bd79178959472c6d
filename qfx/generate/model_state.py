"""The state of a model that programs depend on, and the reasons why a model can have no
programs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from qfx.generate.request import OUTPUTS
from qfx.generate.step_modules import named_tensors
from qfx.host.modules import backward_hooks, forward_hooks, unsaved_buffers
from qfx.weights.change_detection import Stamp, stamp_of

PROGRAMS = {torch.float32, torch.bfloat16, torch.float16}  # supported dtypes of parameters
_PLAIN = (bool, int, float, str)
# Private names of transformers that have no public equivalent; tests fail if one is removed.
ATTENTION = "_attn_implementation"  # attribute of a config: the name of its attention function
PREPARES_CACHE = "_prepare_cache_for_generation"  # method of a model: gets the largest length
_CAPTURES = "transformers.utils.output_capturing"
NOT_OWN = frozenset(vars(nn.Module()))


def tensors_of(model: nn.Module) -> tuple[Tensor, ...]:
    """Returns the parameters and persistent buffers of a model. Other buffers, such as tables of
    positions, may be written by the model itself when it runs."""
    unsaved = {id(b) for module in model.modules() for b in unsaved_buffers(module)}
    tensors = {id(tensor): tensor for _, tensor in named_tensors(model)}
    return tuple(t for at, t in tensors.items() if at not in unsaved)


def values_of(tensors: tuple[Tensor, ...]) -> list[Stamp]:
    """Returns version stamps that change when the values of the tensors change, as far as PyTorch
    counts writes."""
    return [stamp_of(tensor) for tensor in tensors]


def settings_of(model: Any) -> list[Any]:
    """Returns values that change if a module of the model is replaced or a setting changes, such as
    the active adapters."""
    found: list[Any] = [attention_of(model), _more_outputs(model)]
    for module in model.modules():
        own = [(n, _plain(v)) for n, v in vars(module).items() if n not in NOT_OWN]
        unsaved = [stamp_of(b).address for b in unsaved_buffers(module)]
        found.append((id(module), module.training, _hooks(module), own, unsaved))
    return found


def _plain(value: Any) -> Any:
    """Returns numbers and strings, also in lists and dicts; None in place of anything else."""
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (list, tuple):
        return [_plain(v) for v in value]
    return [(n, _plain(v)) for n, v in value.items()] if type(value) is dict else None


def why_none(model: Any) -> str | None:
    """Returns why a model can have no programs; None if no reason is known."""
    kinds = {t.dtype for t in model.parameters() if t.is_floating_point()} - PROGRAMS
    devices = {t.device.type for t in tensors_of(model)} - {"cpu"}
    if model.training:
        return "it is in training mode: call model.eval()"
    if kinds or devices:
        found = ", ".join(sorted(map(str, {*kinds, *devices})))
        return (
            f"some of it is {found}, and programs are of float32, bfloat16 and float16 on the CPU"
        )
    hooked = [n for n, m in model.named_modules() if n and _hooks(m)]
    if hooked:
        return f"{hooked[0]} has hooks, which only modules call"
    more = _more_outputs(model)
    if more:
        return f"its configuration has {more[0]}=True, and programs return logits alone"
    kind = attention_of(model)
    own = makes_masks(model) and not model.config.is_encoder_decoder
    if kind != "sdpa" and not is_capped(model) and not own:
        return (
            f"its attention is {kind!r}, which does not read an int8 cache; 'sdpa' does, where "
            "the model has it (model.set_attn_implementation)"
        )
    return None


def _more_outputs(model: Any) -> list[str]:
    """Returns the outputs besides logits that the configuration asks for in every call."""
    text = model.config.get_text_config(decoder=True)
    return [name for name in OUTPUTS if getattr(text, name, False)]


def is_capped(model: Any) -> bool:
    """Whether the model calls the attention functions of transformers and has a softcap of scores,
    so that `cached_attention.py` replaces its attention. The sdpa function of transformers has no
    softcap."""
    text = model.config.get_text_config(decoder=True)
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    return capped and bool(getattr(model, "_supports_attention_backend", False))


def makes_masks(model: Any) -> bool:
    """Whether the model takes only a mask of the tokens [B, L] and computes the mask of each query
    itself: its modules write out attention (BLOOM, MPT, GPT-J), or scores have slopes (Falcon with
    alibi)."""
    text = model.config.get_text_config(decoder=True)
    written_out = not getattr(model, "_supports_attention_backend", False)
    sloped = bool(getattr(text, "alibi", False))
    return sloped or (written_out and attention_of(model) == "eager")


def _hooks(module: nn.Module) -> int:
    return _count(forward_hooks(module))


def hooks_on(module: nn.Module) -> int:
    """Returns the number of hooks on the calls of a module, including backward hooks."""
    return _count(chain(forward_hooks(module), backward_hooks(module)))


def _count(hooks: Iterable[Any]) -> int:
    """Counts hooks, without those that transformers leaves once hidden states or attentions were
    requested: these do nothing otherwise."""
    return sum(getattr(hook, "__module__", None) != _CAPTURES for hook in hooks)


def attention_of(model: Any) -> str:
    """Returns the name of the attention implementation in transformers."""
    kind: str = getattr(model.config.get_text_config(decoder=True), ATTENTION)
    return kind
