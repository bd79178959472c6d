"""Codes that are not the nearest: that they run as they are, and which weight they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx import PER_COLUMN, PER_TENSOR, QSpec, Recipe, Rounding, Scheme
from qfx.calibration import calibrate_model as calibrating
from qfx.cost.device_models import costs_from
from qfx.cost.model import Costs
from qfx.ops import REFERENCES as ref
from qfx.ops.code import code_of
from qfx.ops.layout import layout_of
from qfx.ops.packing import Packing
from qfx.ops.single_tensors import dequantize, quantize
from qfx.values.config import PRESETS
from qfx.values.rounding import weight_digest
from qfx.weights.cache import pack
from qfx.weights.recipe_codes import digest_for
from tests.conftest import same_bits
from tests.lib.costs import Prices
from tests.lib.models import compiled
from tests.lib.rounded import K, Net, batches, calibrated, codes_of, nearest, run


@pytest.fixture(scope="module")
def net() -> Net:
    return Net().eval()


@pytest.fixture(scope="module")
def recipe(net: Net) -> Recipe:
    return calibrated(net)


SCHEMES: list[Any] = [
    *(name for name in PRESETS if name not in ("w8a8-symmetric", "w8a8-asymmetric", "w7a7")),
    Scheme(x=QSpec(axes=PER_COLUMN, static=True)),
    Scheme(w=QSpec(bits=2, axes=PER_TENSOR)),
    Scheme(x=QSpec(group=32)),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_codes_run_as_they_are(scheme: Any) -> None:
    """In every form of the model: bit for bit what the references say of these codes."""
    model = nn.Sequential(nn.Linear(K, 33)).eval()
    recipe = calibrated(model, scheme)
    (site,), x = recipe.sites, batches()[0]
    assert site.scheme and site.rounding
    factor = None if site.factor is None else torch.tensor(site.factor)
    wanted = by_hand(site, x, model[0].weight.detach(), model[0].bias.detach(), factor)
    assert same_bits(run(model, recipe, x), wanted)
    assert same_bits(qfx.rewrite(qfx.trace(model, x), qfx.Config(recipe=recipe))[0](x), wanted)
    assert not same_bits(run(model, nearest(recipe), x), wanted)
    module = qfx.quantize_(nn.Sequential(model[0]).eval(), qfx.Config(recipe=recipe))
    with torch.no_grad():
        assert same_bits(module(x), wanted)
    assert torch.equal(module[0].codes, site.rounding.codes)


def by_hand(
    site: qfx.SiteRecipe, x: Tensor, w: Tensor, bias: Tensor, factor: Tensor | None
) -> Tensor:
    """The references on the codes of the recipe."""
    scheme, turn = site.scheme, site.scheme.block(K)  # type: ignore[union-attr]
    assert scheme and site.rounding
    turned = ref["rotate"](w / (1 if factor is None else factor), None, turn)
    stored = quantize(turned, scheme.w)
    zero_point = None if scheme.w.symmetric else stored.zero_point
    layout = layout_of(scheme.w, scheme.group, len(w))
    bits, group = layout[1:3]
    packed = ref["pack_weight"](site.rounding.codes, stored.scale, zero_point, None, bits, group)
    end = (packed, layout, bias, "none", torch.float32)
    if scheme.x is None:
        return ref["linear_float"](ref["rotate"](x, factor, turn), *end)
    zero = None if site.zero_point is None else torch.tensor([site.zero_point]).int()
    given = (None if site.scale is None else torch.tensor([site.scale]), zero)
    codes = ref["quantize"](x, code_of(scheme.x, turn), *given, factor=factor)
    return ref["linear"](*codes, *end)


def test_a_guard_bounds_the_error_of_these_codes() -> None:
    """(B5) of what they stand for: less by far than of the nearest, which they are not here."""
    w, packing = torch.randn(9, 70), Packing(QSpec(), guarded=True)
    codes = quantize(w, QSpec()).codes // 2
    rounding = Rounding("a", "gptq", digest_for(w, packing), codes)
    alpha, beta = pack(w, (), replace(packing, rounding=rounding)).error.tolist()  # type: ignore
    stored = dequantize(quantize(w, QSpec())._replace(codes=codes)).double()
    size, wrong = w.double().norm(dim=1), (w - stored).norm(dim=1)
    assert alpha == pytest.approx((stored.norm(dim=1) / size).max().item(), rel=2.0**-20)
    assert beta == pytest.approx((wrong / size).max().item() + 2.0**-16, rel=2.0**-20)


def test_what_has_no_codes_says_so() -> None:
    recipe = calibrated(Net().eval(), Scheme(w=QSpec(axes=PER_COLUMN)))
    assert not codes_of(recipe)
    assert "rounded to nearest: xs8r_ws8c has a factor of its weight" in str(recipe)


def test_reports_say_how_a_site_was_rounded() -> None:
    model = Net().eval()
    recipe = calibrated(model)
    assert str(recipe).count("rounded by GPTQ") == 3
    report = qfx.explain(model, batches()[0], options={"recipe": recipe})
    assert [row.reason for row in report.rows] == ["by the recipe; rounded by GPTQ"] * 3


def test_passes_are_as_many_as_memory_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are those of the float model in each, so their number changes nothing."""
    model, seen = Net().eval(), list[str]()
    at_once, observe = calibrated(model), calibrating._observe

    def told(*given: Any) -> None:
        seen.append(given[-1])
        observe(*given)

    monkeypatch.setattr(calibrating, "_observe", told)
    monkeypatch.setattr(calibrating, "_MOMENTS", 0.0)
    monkeypatch.setattr(calibrating, "_SMALLEST_MEMORY", 0)
    recipe = calibrated(model)
    assert seen[1:] == ["rounding, 1 of 2", "rounding, 2 of 2"]
    assert codes_of(recipe).keys() == codes_of(at_once).keys()


def test_a_metric_chooses_first() -> None:
    with costs_from(Costs(Prices(4.0))):
        recipe = calibrated(Net().eval(), metric=lambda model: 0.0)
    assert set(codes_of(recipe)) == {"a", "b", "c"}


def test_batches_that_are_gone_are_refused() -> None:
    with pytest.raises(ValueError, match="codes are found in a second pass, but these batches"):
        qfx.calibrate(Net().eval(), iter(batches()), rounding="gptq")
    with pytest.raises(ValueError, match="unknown rounding 'best'; choose from nearest, gptq"):
        calibrated(Net().eval(), rounding="best")


# --- which weight they belong to ---


def changed(net: Net) -> Net:
    other = Net().eval()
    other.load_state_dict(net.state_dict())
    with torch.no_grad():
        other.b.weight[32, K - 1] += 1e-3
    return other


WAYS: dict[str, Callable[[nn.Module, qfx.Config], Any]] = {
    "compile": lambda m, c: run(m, c.recipe, batches()[0]),
    "rewrite": lambda m, c: qfx.rewrite(qfx.trace(m), c),
    "quantize_": lambda m, c: qfx.quantize_(m, c),
    "explain": lambda m, c: qfx.explain(m, batches()[0], options={"recipe": c.recipe}),
}
OTHER_WEIGHT = "recipe of b: its weight is not the one that was rounded by GPTQ.*Calibrate"


@pytest.mark.parametrize("way", WAYS)
def test_another_weight_is_refused(way: str, net: Net, recipe: Recipe) -> None:
    other, config = changed(net), qfx.Config(recipe=recipe)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match=OTHER_WEIGHT):
        WAYS[way](other, config)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


CHANGES = {"scheme": Scheme(rotation=16), "factor": (2.0,) * K, "outliers": (3,)}


@pytest.mark.parametrize("what", CHANGES)
def test_codes_of_another_transform_are_refused(what: str, net: Net, recipe: Recipe) -> None:
    """As of a recipe that was edited: the codes belong to the transformed weight."""
    changes: dict[str, Any] = {what: CHANGES[what]}
    sites = tuple(replace(s, **changes) if s.name == "b" else s for s in recipe.sites)
    with pytest.raises(ValueError, match=OTHER_WEIGHT):
        run(net, Recipe(sites), batches()[0])


def test_a_weight_that_changes_later_is_refused_until_it_is_back(recipe: Recipe) -> None:
    model, x = Net().eval(), batches()[0]
    torch._dynamo.reset()
    fast = compiled(model, recipe=recipe)
    with torch.no_grad():
        wanted, weight = fast(x), model.b.weight.clone()
        model.b.weight.mul_(1.5)
        for _ in range(2):
            with pytest.raises(ValueError, match=OTHER_WEIGHT):
                fast(x)
        model.b.weight.copy_(weight)
        assert same_bits(fast(x), wanted)


def test_a_weight_that_trains_is_rounded_to_nearest(recipe: Recipe) -> None:
    model, x = Net(), batches()[0]
    model.c.requires_grad_(False)
    _, plan = qfx.rewrite(qfx.trace(model, x), qfx.Config(recipe=recipe), training=True)
    trained = "by the recipe; rounded to nearest, as its weight is packed at every call: it trains"
    assert [e.reason for e in plan.entries] == [*[trained] * 2, "by the recipe; rounded by GPTQ"]
    torch._dynamo.reset()
    y = compiled(model, recipe=recipe)(x)
    last = [s for s in recipe.sites if s.name == "c"]
    others = [s for s in nearest(recipe).sites if s.name != "c"]
    assert same_bits(y.detach(), run(model, Recipe((*others, *last)), x))


def test_two_recipes_of_one_weight_are_told_apart(net: Net, recipe: Recipe) -> None:
    """By the packed weights, and by Dynamo, whose key holds the options."""
    x, plain = batches()[0], nearest(recipe)
    torch._dynamo.reset()
    with torch.no_grad():
        models = [compiled(net, recipe=r) for r in (recipe, plain)]
        results = [[m(x) for m in models] for _ in range(2)]
    assert not same_bits(*results[0])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    again = calibrated(Net().eval())
    assert again == recipe != plain and hash(again) == hash(recipe)


def test_the_digest_is_of_the_values_alone() -> None:
    """Whatever their type and strides; the same in every process and on every machine."""
    w = torch.arange(6.0).reshape(2, 3)
    wanted = "da4bb2896e4a4fec8c863252c74ba2943e644947129d4d743563e207f040771a"
    for same in (w, w.bfloat16(), w.double(), w.t().contiguous().t()):
        assert weight_digest(same, "s8r") == wanted
    for other in ((w, "s4r"), (w.reshape(3, 2), "s8r"), (w + 1, "s8r")):
        assert weight_digest(*other) != wanted


def test_modules_keep_the_codes(tmp_path: Path, net: Net, recipe: Recipe) -> None:
    """Through a file of their state dict, into modules of another scheme."""
    model, fresh = Net().eval(), Net().eval()
    qfx.quantize_(model, qfx.Config(recipe=recipe))
    qfx.quantize_(fresh)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fresh.load_state_dict(torch.load(tmp_path / "model.pt"))
    with torch.no_grad():
        assert same_bits(fresh(batches()[0]), model(batches()[0]))
    for site, (name, codes) in zip(recipe.sites, codes_of(recipe).items(), strict=True):
        assert torch.equal(fresh.get_submodule(name).codes, codes)  # type: ignore[arg-type]
        alone = qfx.nn.Linear(site.k, site.n, fresh.get_submodule(name).bias is not None, site)
        alone.load_state_dict(model.get_submodule(name).state_dict())
        assert torch.equal(alone.codes, codes)
