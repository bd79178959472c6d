"""Kernels for checkpoints in other forms, with the classes of fake_vllm.py in the place of vLLM's:
products equal those with the weights that the checkpoint stands for."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.vllm.plugin import register
from tests.vllm import fake_vllm as fake

N, K, T = 48, 256, 5
NAMES = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[Any]:
    """Returns the module of the kernels."""
    with fake.installed():
        register()
        register()
        yield import_module("qfx.vllm.kernels")


def inputs() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(T, K, generator=g), torch.randn(N, generator=g)


def layer(**tensors: Tensor) -> Any:
    made: Any = nn.Module()
    for name, t in tensors.items():
        made.register_parameter(name, nn.Parameter(t, requires_grad=False))
    made.bias = None
    return made


def test_vllm_knows_both_once(kernels: Any) -> None:
    found = {(fake.CPU, "int8"): [kernels.Int8Kernel], (fake.CPU, "mp"): [kernels.FourBitKernel]}
    assert found == fake.KERNELS


@pytest.mark.parametrize("channelwise", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_weights_and_activations(kernels: Any, channelwise: bool, symmetric: bool) -> None:
    """The error of 8-bit activations is near 40 dB below the outputs."""
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(-128, 128, (N, K), generator=g).to(torch.int8)
    widths = [32, 16]
    scale = torch.rand(N if channelwise else 2, 1, generator=g) / 100
    rows = scale if channelwise else scale.repeat_interleave(torch.tensor(widths), 0)
    config = SimpleNamespace(
        is_static_input_scheme=False, is_channelwise=channelwise, input_symmetric=symmetric
    )
    made = layer(weight=codes, weight_scale=scale)
    made.logical_widths = widths
    kernel = kernels.Int8Kernel(config, NAMES)
    kernel.process_weights_after_loading(made)
    x, bias = inputs()
    wanted = x @ (codes * rows).T + bias
    got = kernel.apply_weights(made, x, bias)
    assert qfx.sqnr(wanted, got) > 38
    assert made.weight.ndim == 1 and made.weight_scale is None
    half = kernel.apply_weights(made, x.bfloat16())
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("turned", [False, True])
def test_four_bit_weights(kernels: Any, group: int, turned: bool) -> None:
    """Activations are float, so that only float sums differ. `turned`: with the inputs as the first
    dimension, as other checkpoints have them."""
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (N, K), generator=g)
    scale = (torch.rand(N, K // group, generator=g) / 100).bfloat16()
    words = sum(codes[:, i::8] << (4 * i) for i in range(8))
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    tensors = {"weight_packed": words, "weight_scale": scale}
    made = layer(**{name: t.t().contiguous() if turned else t for name, t in tensors.items()})
    for name in tensors:
        param: Any = getattr(made, name)
        param.input_dim, param.output_dim = (0, 1) if turned else (1, 0)
    config = SimpleNamespace(weight_type="uint4b8", zero_points=False, group_size=group)
    assert kernels.FourBitKernel.can_implement(config)[0]
    kernel = kernels.FourBitKernel(config, *tensors)
    kernel.process_weights_after_loading(made)
    x, bias = inputs()
    weight = (codes - 8).view(N, -1, group) * scale.float()[..., None]
    wanted = (x.double() @ weight.view(N, K).double().T + bias).float()
    assert qfx.sqnr(wanted, kernel.apply_weights(made, x, bias)) > 100


@pytest.mark.parametrize(
    ("kernel", "fields", "why"),
    [
        ("Int8Kernel", {"is_static_input_scheme": True}, "no static one"),
        ("FourBitKernel", {"weight_type": "uint4"}, "4 bits and no zero points"),
        ("FourBitKernel", {"zero_points": True}, "4 bits and no zero points"),
        ("FourBitKernel", {"group_size": -1}, "groups are of 32, 64, 128 inputs"),
    ],
)
def test_what_is_left_to_vllm(kernels: Any, kernel: str, fields: Any, why: str) -> None:
    usual = {"weight_type": "uint4b8", "zero_points": False, "group_size": 64}
    can, reason = getattr(kernels, kernel).can_implement(SimpleNamespace(**usual | fields))
    assert not can and why in reason
