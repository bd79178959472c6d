"""packed_together moves the packed weights of a model, and nothing that it computes."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import qfx
from qfx.nn.contiguous_weights import make_contiguous


def _model(scheme: str = "w8a8") -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(128, n, bias=n < 100) for n in (128, 40, 128)]
    twin = copy.deepcopy(linears[0])
    model = nn.Sequential(linears[0], nn.ReLU(), linears[2], twin, linears[1]).eval()
    qfx.quantize_(model, qfx.Config(scheme=scheme))
    model[3].weight = model[0].weight
    return model


def _places(model: nn.Module) -> list[tuple[int, int]]:
    """Where each packed weight begins, and the line behind it."""
    tensors = {id(m.packed): m.packed for m in model.modules() if isinstance(m, qfx.nn.Linear)}
    return [(t.data_ptr(), t.data_ptr() + -(-t.nbytes // 64) * 64) for t in tensors.values()]


def _follow(places: list[tuple[int, int]]) -> bool:
    return all(end == begin for (_, end), (begin, _) in itertools.pairwise(places))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "w5a8"])
def test_they_lie_in_order_and_give_the_same(scheme: str) -> None:
    model, x = _model(scheme), torch.randn(3, 128)
    before = model(x)
    make_contiguous(model)
    places = _places(model)
    assert len(places) == 3 and _follow(places)
    assert model[0].packed is model[3].packed
    assert torch.equal(model(x), before)
    make_contiguous(model)
    assert _places(model) == places


def test_models_that_share_layers_do_not_take_them_from_each_other() -> None:
    layers = [*_model(), *_model()]
    whole, part = nn.Sequential(*layers), nn.Sequential(*layers[:5], _model()[4])
    make_contiguous(whole)
    places = _places(whole)
    make_contiguous(part)
    assert _places(whole) == places and len(places) == 6


def test_each_has_memory_of_its_own() -> None:
    model = _model()
    make_contiguous(model)
    for linear in (model[0], model[2]):
        storage = linear.packed.untyped_storage()
        assert storage.nbytes() == linear.packed.nbytes and linear.packed.storage_offset() == 0


def test_a_weight_that_was_written_moves_again() -> None:
    model, x = _model(), torch.randn(3, 128)
    make_contiguous(model)
    with torch.no_grad():
        model[2].weight.data = qfx.nn.Linear.from_float(nn.Linear(128, 128)).weight.data
    assert not _follow(_places(model))
    before = model(x)
    make_contiguous(model)
    assert _follow(_places(model)) and torch.equal(model(x), before)


def test_a_linear_survives_its_model() -> None:
    model, x = _model(), torch.randn(3, 128)
    make_contiguous(model)
    last, state = copy.deepcopy(model[4]), model.state_dict()
    expected, linear = model[4](x), model[4]
    del model
    assert torch.equal(linear(x), expected) and torch.equal(last(x), expected)
    fresh = _model()
    fresh.load_state_dict(state)
    assert torch.equal(fresh[4](x), expected)


def test_who_generates_in_inference_mode_may_train_later() -> None:
    model = _model()
    with torch.inference_mode():
        make_contiguous(model)
    x = torch.randn(3, 128, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and bool(x.grad.any())


def test_what_processes_share_stays() -> None:
    model = _model().share_memory()
    make_contiguous(model)
    assert model[0].packed.is_shared() and model[2].packed.is_shared()


def test_what_is_not_on_the_cpu_stays() -> None:
    model = _model()
    packed = model[2].to("meta").packed
    make_contiguous(model)
    assert model[2].packed is packed and packed.is_meta
    make_contiguous(nn.Sequential())
