"""The functions that turn the linears of a small model into modules of qfx, one row each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import qfx

K = 32
X = torch.randn(6, K, generator=torch.Generator().manual_seed(0))
TENSOR = qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR))
NEW = (qfx.nn.Linear, qfx.nn.LSQLinear, qfx.nn.BinaryLinear, qfx.nn.SignLinear)
Prepare = Callable[..., nn.Module]
PREPARE: dict[str, Prepare] = {
    "quantize_": qfx.quantize_,
    "prepare_qat": lambda m, config=None: qfx.prepare_qat(m, X, config=config),
    "prepare_qat, learned": lambda m, config=None: qfx.prepare_qat(
        m, X, config=config or qfx.Config(scheme=TENSOR)
    ),
    "prepare_binary": lambda m, config=None: qfx.prepare_binary(m, X, config=config),
}
TRAINED = ("prepare_qat", "prepare_qat, learned", "prepare_binary")  # `convert` takes these
REPLACE = PREPARE | {
    f"convert of {how}": lambda m, how=how: qfx.convert(PREPARE[how](m)) for how in TRAINED
}
BY_ALL = pytest.mark.parametrize("how", PREPARE)
BY_EACH = pytest.mark.parametrize("how", REPLACE)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, K), nn.GELU(), nn.Linear(K, K))
