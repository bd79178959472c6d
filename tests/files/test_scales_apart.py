"""What versions wrote whose packed weights had their scales apart: states load, bit for bit;
programs are refused by a sentence that says what to do. The files stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qfx
from qfx.generate import load_programs
from tests.conftest import same_bits

FOLDER = Path(__file__).parent / "earlier" / "apart"
STATES: dict[str, Any] = torch.load(FOLDER / "states.pt")


@pytest.mark.parametrize("scheme", STATES["models"])
def test_a_state_of_every_scheme_loads(scheme: str) -> None:
    saved = STATES["models"][scheme]
    model = nn.Sequential(nn.Linear(96, 40), nn.ReLU(), nn.Linear(40, 8, bias=False))
    qfx.quantize_(model, qfx.Config(scheme=scheme, minimum_gain=0))
    model.load_state_dict(saved["state"])
    with torch.no_grad():
        assert same_bits(model(STATES["x"]), saved["y"])
    again = model.state_dict()
    assert list(again) == list(saved["state"])
    assert all(torch.equal(again[name], saved["state"][name]) for name in again)


def test_an_exported_program_is_refused_by_name() -> None:
    program = torch.export.load(FOLDER / "exported.pt2").module()
    with pytest.raises(RuntimeError, match=r"qfx::int8_linear_dynamic is .*Export the model again"):
        program(STATES["x"])


def test_an_exported_program_with_shared_codes_is_refused() -> None:
    """Its operator `quantize` had other arguments, which torch names in a warning."""
    with pytest.raises(RuntimeError, match="deserializing"):
        torch.export.load(FOLDER / "shared.pt2")


def test_a_program_of_steps_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="save them again"):
        load_programs(FOLDER / "programs.safetensors")
