"""FusedLora: PEFT's LoRA layer for linears, whose update is one function. Imports PEFT."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from qfx.host.autograd import in_forward_mode, transforming
from qfx.host.modules import global_hooks, is_watched
from qfx.nn.dtypes import output_dtype
from qfx.nn.linear import Linear
from qfx.nn.lora_update import lora_update

_PLAIN = (Tensor, nn.Parameter)  # not of a subclass, whose products are its own


class FusedLora(LoraLinear):
    """peft's lora.Linear, with the same attributes and state. Its forward pass adds the update of
    each active adapter to the output of the base in one function (T4), in the dtype of that output.

    PEFT's own forward pass does all else: variants such as DoRA, adapters with a bias, batches of
    several adapters, parts with hooks or another class, compiled and traced graphs and torch.func.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns [..., N] for x [..., K]."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        if args or kwargs or self.disable_adapters or self.merged or not self._fits(x, active):
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        y: Tensor = self.base_layer(x)
        own = type(self.base_layer) is Linear and not _is_changed(self.base_layer)
        for name in active:
            parts: Any = self.lora_A[name], self.lora_B[name]
            a, b = (part.weight for part in parts)
            given, scaling = self.lora_dropout[name](x), self.scaling[name]
            y = lora_update(y, given, a, b, scaling, overwrite=own and y.is_contiguous())
        return y

    def _fits(self, x: Tensor, active: list[str]) -> bool:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        if transforming() or in_forward_mode() or global_hooks() or type(x) not in _PLAIN:
            return False
        return all(name not in self.lora_variant and self._is_plain(name, x) for name in active)

    def _is_plain(self, name: str, x: Tensor) -> bool:
        """Whether PEFT would compute this adapter as `lora_update` does: in float16, whose range is
        small, that needs weights of float16."""
        half = output_dtype(x) == torch.float16
        return isinstance(self.scaling[name], int | float) and all(
            type(part) is nn.Linear
            and part.bias is None
            and type(part.weight) in _PLAIN
            and not _is_changed(part)
            and (part.weight.dtype == torch.float16 or not half)
            for part in (self.lora_A[name], self.lora_B[name])
        )


def _is_changed(part: nn.Module) -> bool:
    """Whether somebody sees the calls of a part, or replaced its forward pass."""
    return is_watched(part) or "forward" in vars(part)
