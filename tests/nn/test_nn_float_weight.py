"""Writing to the weight of a qfx.nn.Linear, as whoever merges an adapter does: it is quantized
again, and taking the change back restores the codes. (Q13)"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qfx
from qfx.ops.rotation import transformed_weight
from tests.lib.models import compiled
from tests.lib.pairs import every
from tests.lib.strategies import SEEDS
from tests.nn.test_nn_linear import BY_VARIED, K, N, X, made, outputs, w_values


def transformed(module: qfx.nn.Linear, w: Tensor) -> Tensor:
    """As the module's codes are of it, in float64."""
    return transformed_weight(w, module.factor, module.scheme.rotation).double()


def steps(module: qfx.nn.Linear) -> Tensor:
    """Of each element, [N, K]."""
    rows = module.quantized.unpacked.scale.reshape(N, -1)
    return rows.repeat_interleave(module.scheme.w.group or K, 1)[:, :K].double()


def delta(seed: int, size: float = 0.05) -> Tensor:
    """Of rank 4, as an adapter's."""
    g = torch.Generator().manual_seed(seed)
    return size / 2 * torch.randn(N, 4, generator=g) @ torch.randn(4, K, generator=g)


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@BY_VARIED
def test_the_weight_is_what_multiplies_x(row: str) -> None:
    """factor * (R^T w'^), so that it transforms to w'^ but for two roundings (B4)."""
    module = made(row)
    w, values = module.weight, w_values(module)
    assert w.dtype == torch.float32 and w.shape == (N, K)
    bound = 2.0**-17 * values.norm(dim=1, keepdim=True)
    assert ((transformed(module, w) - values).abs() <= bound).all()


@BY_VARIED
def test_what_is_written_is_quantized_and_taken_back(row: str) -> None:
    module = made(row)
    first, y = bits(module), outputs(module)
    wanted = module.weight + delta(0)
    module.weight.data += delta(0)
    assert module.scheme == made(row).scheme
    error = (transformed(module, wanted) - w_values(module)).abs()
    norm = transformed(module, wanted).norm(dim=1, keepdim=True)
    assert (error <= steps(module) + norm * 2.0**-16).all()
    second = bits(module)
    assert not same(first, second) and not torch.equal(outputs(module), y)
    module.weight.data = module.weight.data + delta(1)
    module.weight.data -= delta(1)
    assert same(bits(module), second)
    module.weight.data -= delta(0)
    assert same(bits(module), first) and torch.equal(outputs(module), y)


IN_PLACE: dict[str, Any] = {
    "add_": lambda w, d: w.add_(d),
    "iadd": lambda w, d: w.__iadd__(d),
    "setitem": lambda w, d: w.__setitem__(slice(None), w + d),
    "copy_": lambda w, d: w.copy_(w + d),
    "function": lambda w, d: torch.Tensor.add_(w, d, alpha=1),
}


@pytest.mark.parametrize("how, of", every(IN_PLACE, ["weight", "data"]))
def test_writes_in_place_are_heard(how: str, of: str) -> None:
    module, other = made("factor"), made("factor")
    with torch.no_grad():
        IN_PLACE[how](module.weight if of == "weight" else module.weight.data, delta(0))
    other.weight.data = other.weight + delta(0)
    assert same(bits(module), bits(other)) and not same(bits(module), bits(made("factor")))
    module.weight.data -= delta(0)
    assert same(bits(module), bits(made("factor")))


def test_what_is_computed_from_it_is_plain() -> None:
    module = made("factor")
    w = module.weight
    plain = [w + 1, w[0].clone(), w[:, 1].contiguous(), w.sum(0), w @ w.t(), -w, w.dequantize()]
    assert [type(t) for t in plain] == [Tensor] * len(plain)
    assert torch.equal(copy.deepcopy(w), w) and type(copy.deepcopy(w)) is type(w)


@given(SEEDS, st.integers(-12, 6), st.sampled_from(["xs8r_ws8r", "factor", "xs8r_ws8r_h64"]))
def test_whatever_is_written_is_within_a_step_and_restored(
    seed: int, exponent: int, row: str
) -> None:
    module, change = made(row), delta(seed, 2.0**exponent)
    first = bits(module)
    wanted = module.weight + change
    module.weight.data += change
    error = (transformed(module, wanted) - w_values(module)).abs()
    norm = transformed(module, wanted).norm(dim=1, keepdim=True)
    assert (error <= steps(module) + norm * 2.0**-16).all()
    module.weight.data -= change
    assert same(bits(module), first)


@pytest.mark.parametrize("row", ["xs8r_ws8r", "xs8r_ws8r_h64", "factor"])
def test_a_change_far_below_the_steps_is_not_lost(row: str) -> None:
    """Of its direction as much is there as was written, within 6 deviations of random rounding,
    each of a variance of at most step |d|. To the nearest it would be none."""
    module = made(row)
    held, before = w_values(module), module.weight.dequantize()
    module.weight.data += delta(0, 2e-5)
    change = transformed(module, before + delta(0, 2e-5)) - held
    assert (change.abs() < steps(module) / 2).all()
    kept = ((w_values(module) - held) * change).sum()
    deviation = (steps(module) * change.abs() * change.square()).sum().sqrt()
    assert (kept - change.square().sum()).abs() < 6 * deviation < change.square().sum()


def test_the_log_says_what_rounding_lost(caplog: pytest.LogCaptureFixture) -> None:
    module, held = made("xs8r_ws8r"), made("xs8r_ws8r").weight.dequantize()
    with caplog.at_level(logging.INFO, "qfx"):
        module.weight.data += delta(0)
    db = float(qfx.sqnr(held + delta(0), module.weight))
    assert f"{K}x{N} was written, {db:.1f} dB above its rounding; " in caplog.text


WRITES = {
    "loaded": lambda module, w: module.load_state_dict({"weight": w, "bias": module.bias}),
    "drawn": lambda module, w: (module.weight.data.copy_(w), module.settle()),
    "data, then settled": lambda module, w: (setattr(module.weight, "data", w), module.settle()),
}


def kept(module: Any) -> int:
    """Bytes of the codes from before what was written."""
    return sum(each.frozen.packed.nbytes for each in module.weight.memory.earlier)


@pytest.mark.parametrize("how", WRITES)
def test_a_write_for_good_keeps_one_set_of_codes(how: str) -> None:
    module, w = made("xs8r_ws8r"), float(3) * torch.randn(N, K)
    WRITES[how](module, w)
    assert kept(module) == 0
    again = qfx.nn.Linear.from_float(linear_of(w), qfx.Scheme())
    assert torch.equal(module.codes, again.codes)


def linear_of(w: Tensor) -> nn.Linear:
    linear = nn.Linear(K, N)
    linear.weight.data = w.clone()
    return linear


def test_earlier_codes_are_no_part_of_a_file_or_a_copy() -> None:
    module = made("xs8r_ws8r")
    keys = module.state_dict().keys()
    module.weight.data += delta(0)
    assert module.state_dict().keys() == keys
    copied = copy.deepcopy(module)
    assert kept(module) == module.packed.nbytes and kept(copied) == 0
    copied.weight.data += delta(1)
    copied.load_state_dict(made("xs8r_ws8r").state_dict())
    assert kept(copied) == 0
    module.weight.data -= delta(0)
    assert same(bits(module), bits(made("xs8r_ws8r")))


REFUSED: dict[str, tuple[type[Exception], Any, str]] = {
    "shape": (ValueError, torch.ones(K, N), r"is \[192, 40\] on cpu, expected values \[40, 192\]"),
    "meta": (ValueError, torch.ones(N, K, device="meta"), "on meta, expected values"),
    "dtype": (TypeError, torch.ones(N, K, dtype=torch.int8), "is torch.int8, expected a float"),
    "kind": (TypeError, 1.0, "is float, expected a float tensor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_weight_changes_nothing(what: str) -> None:
    error, value, says = REFUSED[what]
    module = made("factor")
    first = bits(module)
    with pytest.raises(error, match=says):
        module.weight.data = value
    with pytest.raises(TypeError, match="as parameter 'weight'"):
        module.weight = value
    assert same(bits(module), first)


def test_a_row_that_is_not_finite_shows() -> None:
    module, change = made("xs8r_ws8r"), delta(0)
    change[3, 5] = torch.nan
    module.weight.data += change
    assert outputs(module)[..., 3].isnan().all() and not outputs(module)[..., :3].isnan().any()


def test_compiled_code_sees_what_is_written() -> None:
    model = qfx.quantize_(nn.Sequential(nn.Linear(K, N), nn.ReLU()))
    f = compiled(model)
    with torch.no_grad():
        assert torch.equal(f(X), model(X))
        y = f(X)
        model[0].weight.data += delta(0)
        assert torch.equal(f(X), model(X)) and not torch.equal(f(X), y)


def test_it_is_drawn_as_nn_linear_is() -> None:
    module = made("xs8r_ws8r")
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    again = qfx.nn.Linear.from_float(nn.Linear(K, N), qfx.Scheme())
    assert same(bits(module), bits(again))
