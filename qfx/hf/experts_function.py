"""The function "qfx" for the experts of transformers' models: `experts_implementation="qfx"`."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "qfx"
_log = logging.getLogger(__name__)


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Computes a block of float experts on sorted tokens, without a loop that breaks graphs:
    `torch.compile(model, backend="qfx")` makes one int8 call of it. (X2)

    Takes tokens [T, K], the expert of each of S slots [T, S], and their weights [T, S]. Returns [T,
    N]. In eager mode it computes in float, and logs this once.
    """
    if not torch.compiler.is_compiling():
        _say_float(type(module).__name__)
    given = (hidden_states, top_k_index, top_k_weights)
    y: Tensor = grouped_mm_experts_forward(module, *given)
    return y


@cache
def _say_float(kind: str) -> None:
    _log.info(
        '%s computes in float in eager mode, with experts_implementation="qfx" too: compile the '
        'model with torch.compile(model, backend="qfx"), or call qfx.quantize_(model)',
        kind,
    )


def register() -> None:
    """Adds the function to those that transformers knows by name."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
