"""max_divergence: predictions are the formula, on the codes that run; the model stays as it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.calibration import calibrate_model as calibrating
from qfx.calibration.apply_recipe import quantized
from qfx.ops.storage import stored_bytes
from tests.lib.pairs import pairs
from tests.lib.rounded import codes_of

ALL = qfx.Config(minimum_gain=0)
K, CLASSES = 32, 9


class Net(nn.Module):
    """Three linears, two of one input, with an epilogue and a residual between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(K, 48), nn.Linear(K, 48, bias=False), nn.Linear(48, 9)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.c(F.relu(self.a(x)) * self.b(x))


class Pooled(nn.Module):
    """One prediction of many rows, whose errors add up before they count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(K, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).mean(-2)


def batches(count: int = 8, *shape: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(*(shape or (6, 5)), K, generator=random) for _ in range(count)]


def fixed(output: Tensor) -> Tensor:
    """A loss without chance: of each row its distance from the class that comes first in turn."""
    rows = output.reshape(-1, output.shape[-1])
    return F.cross_entropy(rows, torch.arange(len(rows)) % CLASSES, reduction="none")


def calibrated(model: Any, given: Any, budget: Any = math.inf, **keywords: Any) -> qfx.Recipe:
    keywords = {"config": ALL, "loss": fixed, "progress": False, **keywords}
    return qfx.calibrate(model, given, max_divergence=budget, **keywords)


def divergences(recipe: qfx.Recipe) -> dict[str, float | None]:
    return {str(site): site.divergence for site in recipe.sites}


def by_hand(model: nn.Module, recipe: qfx.Recipe, given: list[Tensor]) -> dict[str, float]:
    """(D1) in float64: gradients at the outputs of modules, errors of the operators on codes."""
    found, predictions = dict.fromkeys(divergences(recipe), 0.0), 0
    for x in given:
        exact, seen = copy.deepcopy(model).double(), dict[str, tuple[Tensor, Tensor]]()
        for site in recipe.sites:
            keep = partial(kept, seen, site.name)
            exact.get_submodule(site.name).register_forward_hook(keep)
        each = fixed(exact(x.double()))
        each.sum().backward()
        predictions += each.numel()
        for site in recipe.sites:
            inputs, output = seen[site.name]
            assert output.grad is not None
            d = output.detach() - int8(model.get_submodule(site.name), site, inputs).double()
            d_mn, g_mn = d.flatten(0, -2), output.grad.flatten(0, -2)
            found[site.name] += float(((d_mn @ d_mn.t()) * (g_mn @ g_mn.t())).sum() / site.n)
    return {name: total / (2 * predictions) for name, total in found.items()}


def kept(seen: dict[str, tuple[Tensor, Tensor]], name: str, *called: Any) -> None:
    _, inputs, output = called
    output.retain_grad()
    seen[name] = inputs[0].detach().float(), output


def int8(module: nn.Module, site: qfx.SiteRecipe, x: Tensor) -> Tensor:
    recipe = qfx.Recipe((replace(site, name="0"),))
    torch._dynamo.reset()
    with torch.no_grad():
        y: Tensor = quantized(nn.Sequential(module), replace(ALL, recipe=recipe))(x)
    return y


@pytest.mark.parametrize(
    "make, scheme, rounding",
    pairs([Net, Pooled], ["w8a8", "w4a8", "w8a8-static"], ["nearest", "gptq"]),
)
def test_a_prediction_is_the_formula(make: Any, scheme: str, rounding: str) -> None:
    """Of the batches that are held out, on the codes of the recipe. Three digits are kept of it, so
    half of the third; what float32 adds is far less."""
    model, given, config = make().eval(), batches(), replace(ALL, scheme=scheme)
    recipe = calibrated(model, given, config=config, rounding=rounding)
    assert all(site.scheme for site in recipe.sites)
    assert (rounding == "gptq") == bool(codes_of(recipe))
    wanted = by_hand(model, recipe, given[-2:])
    assert divergences(recipe) == pytest.approx(wanted, rel=6e-3)


def test_errors_that_rows_share_add_up() -> None:
    """Of a mean over rows that are alike: as much as of one row, not a quarter."""
    model = Pooled().eval()
    once = calibrated(model, [x[:, :1] for x in batches()])
    often = calibrated(model, [x[:, :1].expand(-1, 4, -1) for x in batches()])
    assert divergences(often) == pytest.approx(divergences(once), rel=1e-2)


def test_rows_on_the_left_are_as_others() -> None:
    """A weight times columns: the gradient follows the view of the product."""

    class Columns(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            return (self.a.weight @ x).t()

    class Rows(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            return x.t() @ self.a.weight.t()

    given = [x.reshape(-1, K).t().contiguous() for x in batches()]
    (columns,), (rows,) = (calibrated(m().eval(), given).sites for m in (Columns, Rows))
    assert columns.scheme and columns.divergence == pytest.approx(rows.divergence, rel=1e-2)


def test_predictions_cross_graph_breaks() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.a(x)) * self.b(x)
            torch._dynamo.graph_break()
            return self.c(y)

    wanted = divergences(calibrated(Net().eval(), batches()))
    assert divergences(calibrated(Broken().eval(), batches())) == pytest.approx(wanted, rel=1e-2)


def test_a_graph_module_is_calibrated_too() -> None:
    model = Pooled().eval()
    wanted = divergences(calibrated(model, batches()))["a"]
    (site,) = calibrated(qfx.trace(model).eval(), batches()).sites
    assert site.divergence == pytest.approx(wanted, rel=1e-2)


class Encoder(nn.Module):
    """Of torch.nn, which takes another way where parameters train and gradients are recorded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        layer = nn.TransformerEncoderLayer(K, 2, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.c = nn.Linear(K, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.layers(x))


def test_encoders_of_torch_have_predictions() -> None:
    model = Encoder().eval()
    recipe = calibrated(model, batches())
    assert all(site.divergence for site in recipe.sites) and len(recipe.sites) == 5


def test_inference_mode_has_predictions() -> None:
    model = Net().eval()
    wanted = divergences(calibrated(model, batches()))
    given = batches()
    with torch.inference_mode():
        found = divergences(calibrated(model, given))
    assert found == pytest.approx(wanted, rel=1e-2)


def test_the_order_of_batches_changes_nothing() -> None:
    """Within those that are for rounding, and those that are held out; up to the third digit."""
    model, given = Net().eval(), batches()
    again = calibrated(model, [*given[5::-1], given[7], given[6]])
    assert divergences(again) == pytest.approx(divergences(calibrated(model, given)), rel=1e-2)


def test_a_budget_of_nothing_leaves_all_float_and_says_why() -> None:
    recipe = calibrated(Net().eval(), batches(), 0.0)
    assert all(site.scheme is None and site.divergence is None for site in recipe.sites)
    assert all("int8 would add" in site.reason for site in recipe.sites)


def test_a_budget_is_kept_and_used() -> None:
    model, given = Net().eval(), batches()
    full = divergences(calibrated(model, given))
    a_and_b = (full["a"] or 0) + (full["b"] or 0)
    allowed = max(a_and_b, full["c"] or 0) * 1.01  # either group, not both
    some = divergences(calibrated(model, given, allowed))
    assert 0 < sum(d is not None for d in some.values()) < 3
    assert sum(d or 0 for d in some.values()) <= allowed


def test_what_reaches_no_output_costs_nothing() -> None:
    class Unused(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.a(2 * x).sum()
            return self.c(self.b(x))

    assert divergences(calibrated(Unused().eval(), batches(), 0.0))["a"] == 0.0


def test_sites_without_gradients_stay_float() -> None:
    class Partly(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                a = F.relu(self.a(x))
            return self.c(a * self.b(x))

    sites = {str(site): site for site in calibrated(Partly().eval(), batches()).sites}
    assert sites["a"].scheme is None and sites["a"].reason == "no gradient was seen"
    assert sites["c"].scheme is not None


def test_the_model_is_left_as_it_was() -> None:
    """Also with gradients, parameters that do not train, some that only code outside of graphs
    reads, and where gradients are off."""

    class Gained(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.outside(super().forward(x))

        @torch._dynamo.disable
        def outside(self, y: Tensor) -> Tensor:
            return y * self.gain

    model = Gained().eval()
    model.a.weight.requires_grad_(False)
    model.c.weight.grad = torch.ones_like(model.c.weight)
    hooked = []
    model.b.weight.register_hook(hooked.append)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    given = [x.requires_grad_() for x in batches()]
    with torch.no_grad():
        calibrated(model, given, loss="labels", rounding="gptq")
    assert all(x.grad is None for x in given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    assert [name for name, value in trains.items() if not value] == ["a.weight"]
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == {"c.weight"} and torch.equal(grads["c.weight"], torch.ones(9, 48))
    assert not hooked


def test_a_model_that_does_not_train_has_predictions() -> None:
    wanted = divergences(calibrated(Net().eval(), batches()))
    found = divergences(calibrated(Net().eval().requires_grad_(False), batches()))
    assert found == pytest.approx(wanted, rel=1e-2)


def test_rounding_does_not_see_the_batches_of_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, observe = {}, calibrating._observe

    def told(model: Any, given: Any, session: Any, progress: bool, what: str) -> int:
        seen[what] = [float(x.sum()) for x in given]
        return observe(model, given, session, progress, what)

    monkeypatch.setattr(calibrating, "_observe", told)
    given = batches()
    calibrated(Net().eval(), given, rounding="gptq")
    first, rounded = seen["calibrating"], seen["rounding, 1 of 1"]
    assert (len(first), rounded) == (8, first[:6])


def test_a_direction_measures_relative_to_the_output() -> None:
    given = batches()

    class Scaled(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            return 1000 * super().forward(x)

    pair = [divergences(calibrated(m().eval(), given, loss=None)) for m in (Pooled, Scaled)]
    assert pair[0] == pytest.approx(pair[1], rel=1e-2)


# --- what is refused ---


def once() -> Iterator[Tensor]:
    yield from batches()


class Detached(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Written(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.a(x)).mul_(self.b(x)).add_(1))


class Counted(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"given": once()}, "gradients are taken in a second pass, but these batches"),
    ({"budget": -1.0}, "max_divergence=-1.0 is not at least 0"),
    ({"budget": math.nan}, "max_divergence=nan is not at least 0"),
    ({"loss": "best"}, "unknown loss 'best'; choose from labels, direction"),
    ({"budget": None}, "a loss serves max_divergence or max_bits; neither is given"),
    ({"metric": lambda model: 0.0}, "metric and max_divergence are given, expected one of them"),
    ({"loss": lambda y: 3}, "the loss returned a int, not a tensor of floats"),
    ({"model": Detached()}, "no gradient reaches a matmul from the loss"),
    ({"model": Counted(), "loss": None}, "returns no tensor of floats"),
    ({"model": Written()}, "the model has no gradients: .* modified by an inplace operation"),
    ({"given": batches(2) + batches(1, 0, 5)}, "that are held out have no prediction"),
]


@pytest.mark.parametrize(("change", "phrase"), REFUSED, ids=[phrase for _, phrase in REFUSED])
def test_refusals(change: dict[str, Any], phrase: str) -> None:
    given = {"model": Pooled(), "given": batches(), **change}
    given["model"].eval()
    with pytest.raises(ValueError, match=phrase):
        calibrated(**given)


def wide() -> nn.Sequential:
    torch.manual_seed(2)
    layers = (nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 96))
    return nn.Sequential(*layers).eval()


def bits_of(recipe: qfx.Recipe) -> float:
    sites = [(s.scheme, s.n, s.k) for s in recipe.sites]
    stored = sum(stored_bytes(scheme.w, scheme.group, n, k) for scheme, n, k in sites if scheme)
    assert all(scheme for scheme, *_ in sites)
    return 8 * stored / sum(n * k for _, n, k in sites)


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_a_budget_of_bits_is_kept(rounding: str) -> None:
    """Scales count; with more bits, more matmuls have those of the better scheme, and what is
    predicted falls."""
    given = [torch.randn(32, 128, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    how = partial(
        qfx.calibrate, wide(), given, replace(ALL, scheme="w4a8"), also=["w8a8"],
        rounding=rounding, progress=False, loss="labels",
    )  # fmt: skip
    recipes = [how(max_bits=bits) for bits in (4.4, 6.0, 8.3)]
    sizes = [bits_of(recipe) for recipe in recipes]
    assert [size <= bits for size, bits in zip(sizes, (4.4, 6.0, 8.3), strict=True)] == [True] * 3
    assert sizes[0] < sizes[1] < sizes[2]
    totals = [sum(s.divergence or 0 for s in recipe.sites) for recipe in recipes]
    assert totals[0] > totals[1] > totals[2]
    with pytest.raises(ValueError, match=r"max_bits=4\.2, .* take at least 4\.40 bits"):
        how(max_bits=4.2)
    with pytest.raises(ValueError, match="max_divergence and max_bits are given"):
        how(max_bits=5.0, max_divergence=0.1)


def test_other_schemes_serve_every_goal() -> None:
    """`also` is for the usual choice too: the most accurate of all within the bound."""
    given = [torch.randn(32, 128, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    config = replace(ALL, scheme="w4a8")
    for also, bits in (([], {4}), (["w8a8"], {8}), ([qfx.Scheme()], {8})):
        recipe = qfx.calibrate(wide(), given, config, also=also, progress=False)
        assert {site.scheme.w.bits for site in recipe.sites if site.scheme} == bits
