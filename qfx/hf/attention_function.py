"""The function "qfx_sdpa" for the attention of transformers' models, as `attn_implementation`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qfx.hf.attention_choice import attended

NAME = "qfx_sdpa"  # transformers refuses a name with "sdpa" for models that do not support it


class _InInt8(TorchFunctionMode):
    """Calls qfx's function in the place of PyTorch's, for an attention module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return attended(self._module, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def attention_forward(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Computes what transformers' "sdpa" computes, with the same arguments, by
    `qfx.nn.functional.scaled_dot_product_attention`, unless gradients are recorded and those in
    int8 are not near those in float (`attention_choice`). In a compiled graph it is "sdpa" itself.

    Raises ValueError for attention sinks and capped scores, which neither has."""
    if has := [name for name in ("s_aux", "softcap") if kwargs.get(name) is not None]:
        raise ValueError(
            f'attn_implementation="{NAME}" does not compute {has[0]}, which this model passes; '
            'attn_implementation="eager" does'
        )
    if torch.compiler.is_compiling():
        return sdpa_attention_forward(module, *args, **kwargs)  # type: ignore[no-any-return]
    with _InInt8(module):
        return sdpa_attention_forward(module, *args, **kwargs)  # type: ignore[no-any-return]


def register() -> None:
    """Adds the function, and the masks of "sdpa", to those that transformers knows by name."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
