"""Memory, copies and state dicts of qfx.nn.Experts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import qfx
from qfx.nn import Experts
from qfx.nn.experts_like import is_experts
from qfx.nn.scheme_tensor import FIELDS
from qfx.nn.stacked_weight import StackedWeight
from tests.conftest import same_bits
from tests.lib.experts_blocks import (
    IDS,
    SCHEMES,
    SIZES,
    H,
    J,
    block_of,
    linears_of,
    model_of,
    routed,
)
from tests.lib.live_bytes import most_bytes


def test_no_float_copy_of_all_experts() -> None:
    """What quantizing makes is the result, and few copies of one expert."""
    wide = transformers.MixtralConfig(**SIZES | {"num_local_experts": 32})
    block = transformers.models.mixtral.modeling_mixtral.MixtralExperts(wide)
    for each in block.parameters():
        nn.init.normal_(each.data, std=0.1)
    floats = sum(p.nbytes for p in block.parameters())
    one = block.gate_up_proj[0].nbytes
    made: list[Experts] = []
    most = most_bytes(lambda: made.append(Experts.from_float(block)))
    stored = made[0].up.packed.nbytes + made[0].down.packed.nbytes
    assert most < stored + 6 * one < floats / 2


def test_float_weights_are_given_up_product_by_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """quantize_ leaves none of the first product when it quantizes the second."""
    model: Any = nn.ModuleDict({"experts": block_of("mixtral")})
    block, left = model["experts"], []
    make = StackedWeight.from_float

    def made(*given: Any) -> StackedWeight:
        left.append([name for name, p in block.named_parameters() if not p.is_meta])
        return make(*given)

    monkeypatch.setattr(StackedWeight, "from_float", made)
    qfx.quantize_(model)
    assert left == [["gate_up_proj", "down_proj"], ["down_proj"]]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "for another process": lambda m: pickle.loads(ForkingPickler.dumps(m)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_copies_are_the_same(scheme: str, how: str) -> None:
    made = Experts.from_float(block_of("gpt-oss"), scheme)
    with torch.no_grad():
        assert same_bits(COPIES[how](made)(*routed()), made(*routed()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_state_dict_brings_its_scheme(scheme: str) -> None:
    """Codes and scales are those of qfx.nn.Linear, with the experts as first dimension."""
    block = block_of("mixtral")
    made, other = Experts.from_float(block, scheme), Experts.from_float(block_of("mixtral"))
    state = made.state_dict()
    linear = linears_of(block.down_proj.detach(), None, scheme)[1].state_dict()
    for name, value in linear.items():
        assert same_bits(
            state[f"down.{name}"] if name == "scheme" else state[f"down.{name}"][1], value
        )
    other.load_state_dict(state)
    assert other.scheme == made.scheme
    with torch.no_grad():
        assert same_bits(other(*routed()), made(*routed()))


def test_a_model_without_values_takes_a_state_dict() -> None:
    """A model that is made and quantized on the meta device needs no float weights."""
    model = qfx.quantize_(model_of("gpt-oss"))
    with torch.device("meta"):
        empty: Any = type(model)(model.config).eval()
    qfx.quantize_(empty)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"experts.up.codes: the module is on the meta device"):
        empty.model.layers[0].mlp.load_state_dict(
            {name.removeprefix("model.layers.0.mlp."): t for name, t in state.items()}, strict=False
        )
    empty.load_state_dict(state, assign=True)
    empty.model.rotary_emb = model.model.rotary_emb
    with torch.no_grad():
        assert same_bits(empty(IDS).logits, model(IDS).logits)


def test_patterns_for_experts_are_known_where_experts_stay_float() -> None:
    config = qfx.Config(skip=["experts"])
    model = qfx.prepare_qat(model_of("mixtral"), IDS, config=config)
    assert is_experts(model.model.layers[0].mlp.experts)


FAULTS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "up.scale holds 0.0 at": lambda s: s["up.scale"].zero_(),
    "down.codes is missing": lambda s: s.pop("down.codes"),
    "down.scheme' is not there": lambda s: s.pop("down.scheme"),
    "does not belong to 4 experts": lambda s: s.update({"up.codes": s["up.codes"][:3]}),
    "up.bias is torch.float32": lambda s: s.update({"up.bias": s["up.bias"][1:]}),
    "has float activations": lambda s: s["up.scheme"][2:7].zero_(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_state_that_does_not_fit_changes_nothing(fault: str) -> None:
    model = nn.ModuleDict({"experts": block_of("gpt-oss")})
    qfx.quantize_(model)
    state, made = model["experts"].state_dict(), model["experts"]
    FAULTS[fault](state)
    before = made.up.packed, made.down.packed
    with pytest.raises(RuntimeError, match=fault):
        model.load_state_dict({f"experts.{name}": value for name, value in state.items()})
    assert (made.up.packed, made.down.packed) == before


def test_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="from cpu to meta, for which there is no kernel"):
        Experts.from_float(block_of("mixtral")).to("meta")


def test_scales_of_one_type_hold_those_of_all_experts() -> None:
    """Of experts whose scales have a type of their own, as those that another tool wrote."""
    made = Experts.from_float(block_of("mixtral"), "w4a8")
    state = made.state_dict()
    scale = state["up.scale"].to(torch.float16)
    scale[0], scale[1] = 0.5, 1.0009765625  # of any type, and of float16 alone
    state["up.scale"], state["up.scheme"] = scale, made.up.saved_scheme()
    half = [*FIELDS].index("half") + 1
    state["up.scheme"][half] = 1
    made.load_state_dict(state)
    again = made.state_dict()
    assert same_bits(again["up.scale"], scale) and same_bits(again["up.scheme"], state["up.scheme"])
    assert same_bits(made.up.saved_scheme(), state["up.scheme"])


def test_explain_compares_experts() -> None:
    """With their own weights, or with those of a float model."""
    model, reference = qfx.quantize_(model_of("mixtral")), model_of("mixtral")
    for report in (qfx.explain(model, IDS), qfx.explain(model, IDS, reference=reference)):
        rows = {row.module: row for row in report.rows if row.module.endswith("experts")}
        assert [*rows] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
        assert all(row.sqnr_db and row.sqnr_db > 30 for row in rows.values())
        assert report.macs[0] > 0.95 * report.macs[1]
    first = rows["model.layers.0.mlp.experts"]
    assert first.shape == f"{IDS.numel() * 2}x{H}x{2 * J}, {IDS.numel() * 2}x{J}x{H}"
    assert "qfx.nn.Experts" in first.reason
