"""Recurrent modules train aware of quantization, a linear with learned steps for each weight, and
are served by one operator."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.ops.single_tensors import sqnr
from tests.conftest import same_bits

ROWS = qfx.Config(scheme=qfx.Scheme())
X = torch.randn(128, 8, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, :, 0].sum(1) > 0).long()


class Counter(nn.Module):
    """Says of a sequence whether the sum of the first feature is positive."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.out = kind(8, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_it_trains_and_is_served(kind: Any, tmp_path: Path) -> None:
    """Of a served layer the gates are the operator's, which round in another way, so that codes
    may differ near ties: one step of a code of the state is 1/254 of its largest element."""
    model = qfx.prepare_qat(Counter(kind), config=ROWS)
    linears = [m for m in model.modules() if isinstance(m, qfx.nn.LSQLinear)]
    assert len(linears) == 9 and isinstance(model.rnn, qfx.nn.LSTM | qfx.nn.GRU)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        assert all(m.weight.grad is not None and m.w_log_step.grad is not None for m in linears)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    model.eval()
    with torch.no_grad():
        trained = model(X)
        qfx.convert(model)
        assert not [m for m in model.modules() if isinstance(m, qfx.nn.LSQLinear)]
        assert type(model.rnn.hh_l1_reverse) is qfx.nn.Linear
        assert sqnr(trained, model(X)) > 48  # 20 log10(254)
        qfx.save(model, tmp_path)
        assert same_bits(qfx.load(tmp_path, Counter(kind))(X), model(X))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_a_step_is_that_of_the_served_cell(kind: Any) -> None:
    """The products have the same bits. The gates of both are within 2^-22, of factors of at most 1
    for a state within 1, and there are three of them before the last tanh."""
    torch.manual_seed(0)
    model = qfx.prepare_qat(nn.ModuleDict({"cell": kind(8, 16)}), config=ROWS).eval()
    served = qfx.convert(copy.deepcopy(model))
    x, state = torch.randn(5, 8), torch.rand(2, 5, 16) * 2 - 1
    hx = tuple(state) if kind is nn.LSTMCell else state[0]
    with torch.no_grad():
        pairs = zip(model["cell"](x, hx), served["cell"](x, hx), strict=True)
        assert all((a - b).abs().max() <= 2.0**-20 for a, b in pairs)


def test_patterns_leave_a_layer_float() -> None:
    model = qfx.prepare_qat(Counter(nn.LSTM), config=qfx.Config(skip=["rnn"]))
    assert type(model.rnn) is nn.LSTM and type(model.out) is qfx.nn.LSQLinear
    part = qfx.prepare_qat(Counter(nn.LSTM), config=qfx.Config(skip=["rnn.ih_l0"]))
    assert type(part.rnn.ih_l0) is nn.Linear and type(part.rnn.hh_l0) is qfx.nn.LSQLinear
    part(X).sum().backward()
    assert part.rnn.ih_l0.weight.grad is not None


def test_a_failed_call_leaves_the_float_modules() -> None:
    model = Counter(nn.LSTM)
    with pytest.raises(ValueError, match="'nothing' matches nothing"):
        qfx.prepare_qat(model, config=qfx.Config(skip=["nothing"]))
    assert type(model.rnn) is nn.LSTM and type(model.out) is nn.Linear
