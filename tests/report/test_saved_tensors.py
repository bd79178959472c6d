"""qfx.saved_tensors: what a forward pass keeps for its backward pass, counted once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qfx
from tests.lib.models import compiled

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
FLOATS = 4 * 32  # bytes of a feature of X


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))


def counted(model: Any, *inputs: Any) -> dict[tuple[str, str], int]:
    """Bytes by module and operator."""
    found = Counter[tuple[str, str]]()
    for row in qfx.saved_tensors(model, *inputs).rows:
        found[row.module, row.operator] += row.bytes
    return dict(found)


def test_a_float_model() -> None:
    """The input of the first linear is not counted: it exists anyway. That of the second is the
    output of the SiLU, which keeps its own input."""
    assert counted(net(), X) == {("1", "Silu"): 128 * FLOATS, ("2", "Addmm"): 128 * FLOATS}


def test_an_int8_base_keeps_nothing_of_its_inputs() -> None:
    assert counted(qfx.quantize_(net()), X.clone().requires_grad_()) == {
        ("1", "Silu"): 128 * FLOATS
    }


def test_a_compiled_model_keeps_codes() -> None:
    """One byte for each element of the inputs, also of the first linear, with a scale and a zero
    point for each row."""
    found = qfx.saved_tensors(compiled(net()), X)
    codes = [row.bytes for row in found.rows if row.dtype == torch.int8]
    assert codes == [32 * 64, 32 * 128]
    assert 0.5 * found.bytes < 128 * FLOATS < found.bytes  # the SiLU's


def test_adapters_keep_their_input_once() -> None:
    """The base and its adapter read the same input; the adapter keeps its product of 4 features
    too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.SiLU(), nn.Linear(64, 32))
    peft = get_peft_model(qfx.quantize_(model), LoraConfig(r=4, target_modules=["1"]))
    found = counted(peft, X.clone().requires_grad_())
    layer = "base_model.model.1"
    assert {name: size for (name, _), size in found.items()} == {layer: 68 * FLOATS}


def test_checkpointing_keeps_the_inputs_alone() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner = nn.Linear(64, 64), net()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.inner, self.before(x), use_reentrant=True)
            return found

    assert sum(counted(Checkpointed(), X).values()) == 64 * FLOATS


def test_the_table_and_the_model_afterwards() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    lines = str(qfx.saved_tensors(model, X)).splitlines()
    assert lines[0].split() == ["module", "operator", "dtype", "tensors", "MB"]
    assert any(line.split()[:2] == ["BatchNorm1d", "NativeBatchNorm"] for line in lines)
    assert lines[-1].endswith("MB saved for the backward pass")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="no output of the model requires gradients"):
        qfx.saved_tensors(net().requires_grad_(False), X)
