"""Kernels for the linears of checkpoints in other forms that vLLM reads: int8 weights with int8
activations, and 4-bit weights in groups with float activations, as compressed-tensors has them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
)
from vllm.model_executor.parameter import permute_param_layout_
from vllm.model_executor.utils import replace_parameter
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types

from qfx.nn.frozen import Frozen, Prepared, linear, prepared
from qfx.ops.storage import Values, packed_values
from qfx.values.scheme import PACKED_GROUPS, QSpec, Scheme

_PER_WORD, _MIDDLE = 8, 8  # codes of 4 bits in an int32, and the code that is 0


@cache
def register_kernels() -> None:
    """Gives vLLM both kernels, after its own: it takes them where `VLLM_DISABLED_KERNELS` names its
    own, or none of its own serves a layer. Its option `--linear-backend` takes no names from
    outside."""
    register_linear_kernel(Int8Kernel, PlatformEnum.CPU, "int8")
    register_linear_kernel(FourBitKernel, PlatformEnum.CPU, "mp")


class Int8Kernel(Int8ScaledMMLinearKernel):  # type: ignore[misc]  # untyped without vLLM
    """W8A8: int8 codes [N, K] with a scale for each output, and activations that are quantized for
    each token, symmetrically if the checkpoint says so. (E1)"""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        if c.is_static_input_scheme:
            return False, "qfx: activations have a scale for each token here, no static one"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        codes, scale, *_ = (getattr(layer, name, None) for name in self.layer_param_names)
        assert codes is not None and scale is not None
        if not self.config.is_channelwise:  # a scale for each of the united linears
            widths = torch.tensor(layer.logical_widths, dtype=torch.int64, device=scale.device)
            scale = scale.reshape(-1).repeat_interleave(widths)
        spec = QSpec(8, symmetric=True)
        x_spec = QSpec(8, symmetric=self.config.input_symmetric)
        values = Values(codes.detach().contiguous(), scale.detach().float().reshape(-1))
        self.how = _replaced(layer, self.layer_param_names[0], values, Scheme(x_spec, spec))
        setattr(layer, self.layer_param_names[1], None)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, bias, Frozen(getattr(layer, self.layer_param_names[0])), self.how)


class FourBitKernel(MPLinearKernel):  # type: ignore[misc]  # untyped without vLLM
    """W4A16: codes of 4 bits with a scale for each group of 32, 64 or 128 inputs, and float
    activations. (Q14)"""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1  # of GPUs

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        if c.weight_type != scalar_types.uint4b8 or c.zero_points:
            return False, "qfx: codes have 4 bits and no zero points here"
        if c.group_size not in PACKED_GROUPS:
            return False, f"qfx: groups are of {', '.join(map(str, PACKED_GROUPS))} inputs"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        words, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        permute_param_layout_(words, input_dim=1, output_dim=0, packed_dim=1)
        permute_param_layout_(scale, input_dim=1, output_dim=0)
        codes, scales = _nibbles(words.detach()), scale.detach().float().contiguous()
        zeros = torch.zeros_like(scales, dtype=torch.int32)
        spec = QSpec(4, symmetric=False, group=self.config.group_size, packed=True)
        self.how = _replaced(layer, self.w_q_name, Values(codes, scales, zeros), Scheme(None, spec))
        setattr(layer, self.w_s_name, None)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, bias, Frozen(getattr(layer, self.w_q_name)), self.how)


def _nibbles(words: Tensor) -> Tensor:
    """Returns the codes int8 [N, K] in int32 words [N, K / 8], the first code in the lowest
    bits."""
    shifts = torch.arange(0, 4 * _PER_WORD, 4, dtype=torch.int32, device=words.device)
    each = (words[..., None] >> shifts) & 15
    return (each - _MIDDLE).to(torch.int8).flatten(1)


def _replaced(layer: nn.Module, name: str, values: Values, scheme: Scheme) -> Prepared:
    """Replaces the codes of a layer by the packed weight, and returns what calls share."""
    replace_parameter(layer, name, packed_values(values, scheme.w, scheme.group))
    return prepared(scheme, values.codes.shape[0])
