"""calibrate: the recipe it makes of a model and batches, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.calibration import OBSERVERS
from qfx.calibration.apply_recipe import quantized
from qfx.calibration.record import Session, SharedInput
from qfx.calibration.search import STRENGTHS, _factors, rounded_activation
from qfx.dynamo_backend.captured_graphs import watch
from qfx.ops.single_tensors import sqnr
from tests.lib.models import compiled
from tests.lib.pairs import pairs

ALL = qfx.Config(minimum_gain=0)
STATIC = qfx.Config(minimum_gain=0, scheme="w8a8-static")
K = 64


class Gated(nn.Module):
    """Two linears of one input with a channel that sticks out, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(K, 128), nn.Linear(K, 128)
        self.down = nn.Linear(128, K)
        self.scale = nn.Parameter(torch.ones(K), requires_grad=False)
        self.scale[5] = 80.0

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return self.down(F.gelu(self.gate(x)) * self.up(x))


class Both(nn.Module):
    """The rows of one activation, and its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, K), nn.Linear(K, K)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b.weight @ x


def batches(count: int = 4, rows: int = 32, seed: int = 1) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, K, generator=random) for _ in range(count)]


def calibrated(model: Any, given: Any, config: qfx.Config = ALL, **keywords: Any) -> qfx.Recipe:
    return qfx.calibrate(model, given, config, progress=False, **keywords)


def recorded(model: nn.Module, x: Tensor) -> dict[Any, SharedInput]:
    session = Session()
    watch(model, session.run, x)
    return session.groups


def by_name(recipe: qfx.Recipe) -> dict[str, qfx.SiteRecipe]:
    return {str(site): site for site in recipe.sites}


def loss(model: nn.Module, x: Tensor, **options: Any) -> float:
    """SQNR of the compiled model against float."""
    torch._dynamo.reset()
    with torch.no_grad():
        return sqnr(model(x), compiled(model, **options)(x))


@pytest.mark.parametrize("config", [ALL, STATIC], ids=lambda c: c.scheme)
def test_a_recipe_is_better_than_no_calibration(config: qfx.Config) -> None:
    """On inputs that calibration did not see: the outlying channel is smoothed or rotated away."""
    model, x = Gated().eval(), batches(seed=2)[0]
    recipe = calibrated(model, batches(), config)
    assert set(by_name(recipe)) == {"gate", "up", "down"}
    plain = loss(model, x, scheme=qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR)))
    assert loss(model, x, recipe=recipe) > plain + 6


def test_sites_of_one_input_share_its_codes() -> None:
    sites = by_name(calibrated(Gated().eval(), batches()))
    assert sites["gate"].scheme == sites["up"].scheme
    assert sites["gate"].factor == sites["up"].factor


@pytest.mark.parametrize(
    "scheme, sticks_out, rounding",
    pairs(["w8a8", "w8a8-static", "w7a7", "w4a8", "w8a8-groups"], [1, 60], ["nearest", "gptq"]),
)
def test_the_error_of_a_site_is_what_it_says(scheme: str, sticks_out: int, rounding: str) -> None:
    """One site, on the rows that were sampled: simulated error against that of the operators. One
    feature may be so large that it stays float."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(K, 96, bias=False)).eval()
    given = batches(1, 32)
    given[0][:, 5] *= sticks_out
    recipe = calibrated(model, given, replace(ALL, scheme=scheme), rounding=rounding)
    assert (recipe.sites[0].rounding is None) == (rounding == "nearest")
    torch._dynamo.reset()
    with torch.no_grad():
        y, noisy = model(given[0]), compiled(model, recipe=recipe)(given[0])
    power = y.square().sum(1)
    error = ((y - noisy).square().sum(1) / power.maximum(power.mean())).mean()
    assert recipe.sites[0].sqnr_db == pytest.approx(-10 * error.log10().item(), abs=0.01)


def test_smoothing_of_rotated_features_follows_their_powers() -> None:
    """Not their maxima, as one far row shows."""
    model, x = nn.Linear(K, 96, bias=False).eval(), batches(1, 200)[0] * torch.logspace(-1, 1, K)
    x[7] *= 5
    (site,) = calibrated(model, [x]).sites
    assert site.scheme.rotation and site.factor is not None
    of_x, of_w = (t.square().mean(0).sqrt() for t in (x, model.weight.detach()))
    wanted = [of_w ** (1 - strength) / of_x**strength for strength in STRENGTHS]
    wanted = [factor / factor.log().mean().exp() for factor in wanted]
    assert any(torch.tensor(site.factor).allclose(factor, rtol=1e-4) for factor in wanted)


def test_factors_move_the_strength_from_activations_to_weights() -> None:
    """s_k = x_k^a / w_k^(1 - a), so that (x_k / s_k)^a and (w_k s_k)^(1 - a) are alike."""
    model, x = nn.Linear(K, 96, bias=False).eval(), batches(1, 200)[0] * torch.logspace(-1, 1, K)
    (group,) = recorded(model, x).values()
    plain, *factors = _factors(group, qfx.Scheme())
    assert plain is None and len(factors) == len(STRENGTHS)
    of_x, of_w = x.abs().amax(0), model.weight.detach().abs().amax(0)
    for factor, a in zip(factors, STRENGTHS, strict=True):
        alike = (of_x * factor) ** a / (of_w / factor) ** (1 - a)
        assert alike.allclose(alike.mean(), rtol=1e-4)


def test_a_channel_that_no_batch_reaches_is_left_as_it_is() -> None:
    """Its size is not known: a factor for the size 0 would be thousands of times the others."""
    (x,) = batches(1, 200)
    x, model = x.index_fill(1, torch.tensor(3), 0.0), nn.Linear(K, 96, bias=False).eval()
    (group,) = recorded(model, x).values()
    for factor in list(_factors(group, qfx.Scheme()))[1:]:
        assert factor is not None and factor[3] == 1.0
        assert factor.max() < 10 and factor.min() > 0.1


def test_rows_and_columns_of_one_activation_are_recorded_apart() -> None:
    (x,) = batches(1, K)
    found = [group.activation.absmax for group in recorded(Both().eval(), x).values()]
    assert [f.tolist() for f in found] == [x.abs().amax(i).tolist() for i in (0, 1)]


def test_a_static_error_is_that_of_the_range_of_all_rows() -> None:
    """Also of those that are not in the sample."""
    x, extreme = torch.rand(4, K), torch.full((1, K), 127.0)
    got = rounded_activation(x, qfx.QSpec(axes=qfx.PER_TENSOR, static=True), "minmax", extreme)
    assert torch.equal(got, x.round())


def test_a_trial_leaves_float_what_its_recipe_does_not_name() -> None:
    model, recipe = Both().eval(), qfx.Recipe((qfx.SiteRecipe("a", 0, K, K, qfx.Scheme()),))
    (x,) = batches(1, K)
    with torch.no_grad():
        (a, b), (a_float, b_float) = quantized(model, replace(ALL, recipe=recipe))(x), model(x)
    assert torch.equal(b, b_float) and not torch.equal(a, a_float)


def test_static_ranges_are_those_of_all_batches() -> None:
    """Of the transformed activation, not of a sample of it."""
    config = replace(STATIC, scheme=qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR, static=True)))
    model, given = nn.Sequential(nn.Linear(K, 8)).eval(), batches(3, 500)
    given[1][123] *= 50
    (site,) = calibrated(model, given, config, max_sqnr_loss_db=60.0).sites
    assert site.scheme == config.scheme
    x = torch.cat(given)
    x = x if site.factor is None else x * torch.tensor(site.factor)
    assert site.scale == pytest.approx(x.abs().max().item() / 127, rel=1e-5)


def without_outliers(recipe: qfx.Recipe) -> qfx.Recipe:
    return qfx.Recipe(tuple(replace(site, outliers=()) for site in recipe.sites))


def test_features_far_out_may_stay_float() -> None:
    """Where neither smoothing nor rotation can: scales per tensor, and one row in many is huge."""
    given = batches(4, 500)
    for x in given:
        x[7, 11] = 1e4
    per_tensor = qfx.QSpec(axes=qfx.PER_TENSOR)
    config = replace(ALL, scheme=qfx.Scheme(x=per_tensor))
    model = nn.Sequential(nn.Linear(K, 96)).eval()
    recipe = calibrated(model, given, config, max_sqnr_loss_db=0.0)
    assert recipe.sites[0].outliers == (11,)
    with torch.no_grad():
        exact = model(given[0])
        int8 = [
            quantized(model, replace(ALL, recipe=r)) for r in (recipe, without_outliers(recipe))
        ]
        noise = [(q(given[0]) - exact)[100:].norm() for q in int8]  # of rows without it
    assert 10 * noise[0] < noise[1]


def test_a_static_preset_is_static_where_the_error_allows() -> None:
    recipe = calibrated(Gated().eval(), batches(), STATIC, max_sqnr_loss_db=3.0)
    assert any(site.scheme.calibrated for site in recipe.sites)


def test_one_weight_read_twice_has_a_recipe_for_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(100 * F.relu(self.fc(x)))

    config = replace(STATIC, scheme=qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR, static=True)))
    model = Twice().eval()
    recipe = calibrated(model, batches(), config, max_sqnr_loss_db=60.0)
    first, second = recipe.sites
    assert (str(first), str(second)) == ("fc", "fc[1]")
    assert second.scale > 10 * first.scale
    assert loss(model, batches()[0], recipe=recipe) > 25


def test_names_hold_across_graph_breaks() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(K, K) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            torch._dynamo.graph_break()
            return self.layers[1](x)

    recipe = calibrated(Broken().eval(), batches())
    assert {site.name for site in recipe.sites} == {"layers.0", "layers.1"}


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"input": x}])
def test_batches_are_tensors_tuples_or_mappings(wrap: Any) -> None:
    model = nn.Sequential(nn.Linear(K, 8)).eval()
    model.forward = lambda input: model[0](input)
    assert len(calibrated(model, [wrap(x) for x in batches()]).sites) == 1


def test_a_weight_that_is_read_through_a_view_is_calibrated() -> None:
    """Nothing else reads it when the matmul runs."""

    class Viewed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.t() + self.bias

    (site,) = calibrated(Viewed(K, 8).eval(), batches()).sites
    assert site.scheme and (site.n, site.k) == (8, K)


def test_batches_of_many_lengths_all_count() -> None:
    """More lengths than Dynamo would compile one by one."""
    model, session = nn.Sequential(nn.Linear(K, 8)).eval(), Session()
    for rows in range(1, 21):
        watch(model, session.run, torch.randn(rows, K))
    (group,) = session.groups.values()
    assert group.activation.rows == sum(range(1, 21))


def test_the_result_is_the_same_every_time() -> None:
    model = Gated().eval()
    assert calibrated(model, batches()) == calibrated(model, batches())


def test_patterns_leave_sites_out() -> None:
    model = Gated().eval()
    assert set(by_name(calibrated(model, batches(), replace(ALL, skip=("up",))))) == {
        "gate",
        "down",
    }
    assert set(by_name(calibrated(model, batches(), replace(ALL, only=("down",))))) == {"down"}


def test_interrupted_observation_counts_what_was_seen() -> None:
    class Interrupted(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count()
            return super().forward(x)

        @torch._dynamo.disable
        def count(self) -> None:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted, 2 batches count"):
        recipe = calibrated(nn.Sequential(Interrupted(K, 8)).eval(), batches())
    assert len(recipe.sites) == 1


def test_samples_fit_in_their_memory() -> None:
    session, memory = Session(), 20_000
    for x in batches(8, 400):
        watch(Gated().eval(), session.run, x)
        session.fit(memory)
    tensors = [
        t for g in session.groups.values() for t in (g.activation.sample, g.activation.extreme)
    ]
    size = sum(t.numel() * t.element_size() for t in tensors)
    assert 0.5 * memory < size <= memory


def test_the_metric_decides() -> None:
    model, x = Gated().eval(), batches(seed=5)[0]
    calls = []

    def metric(tried: Any) -> float:
        calls.append(tried)
        with torch.no_grad():
            return -float((tried(x) - model(x)).norm() / model(x).norm())

    config = replace(ALL, scheme="w7a7")
    loose = calibrated(model, batches(), config, metric=metric, max_drop=1.0)
    assert all(site.scheme and site.scheme.x.bits == 7 for site in loose.sites)
    tight = calibrated(model, batches(), config, metric=metric, max_drop=1e-4)
    assert any(site.scheme is None for site in tight.sites)
    assert metric(quantized(model, replace(config, recipe=tight))) >= -1e-4
    assert len(calls) < 16


def test_batches_are_read_twice_however_many_recipes_are_tried() -> None:
    class Counted(list):
        times = 0

        def __iter__(self) -> Any:
            Counted.times += 1
            return super().__iter__()

    model, given = Gated().eval(), Counted(batches())
    calls = []

    def metric(tried: Any) -> float:
        calls.append(tried)
        with torch.no_grad():
            return -float((tried(given[0]) - model(given[0])).norm())

    calibrated(model, given, STATIC, metric=metric, max_drop=1e-3)
    assert len(calls) > 3
    # the check that they can be read twice asks for an iterator, too
    assert Counted.times == 3


def test_float_stays_where_int8_does_not_gain() -> None:
    config = qfx.Config(minimum_gain=1e5)
    recipe = calibrated(Gated().eval(), batches(), config)
    assert all(site.scheme is None and "x float" in site.reason for site in recipe.sites)


def once() -> Iterator[Tensor]:
    yield from batches()


REFUSED = [
    (lambda: calibrated(Gated(), []), "there are no batches"),
    (lambda: calibrated(Gated(), once(), STATIC), "these batches can be read only once"),
    (lambda: calibrated(Gated(), batches(), observer="max"), "unknown observer 'max'; choose from"),
    (
        lambda: calibrated(Gated(), batches(), replace(ALL, skip=("head",))),
        "'head' matches nothing",
    ),
    (lambda: calibrated(nn.ReLU(), batches()), "no matmul with a constant operand was captured"),
]


@pytest.mark.parametrize(("call", "phrase"), REFUSED, ids=[phrase for _, phrase in REFUSED])
def test_refusals(call: Any, phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        call()


@pytest.mark.parametrize("observer", OBSERVERS)
def test_every_observer_gives_static_ranges(observer: str) -> None:
    model, x = Gated().eval(), batches(seed=7)[0]
    recipe = calibrated(model, batches(), STATIC, observer=observer)
    assert loss(model, x, recipe=recipe) > 25


# --- batches that are more than inputs ---


@pytest.mark.parametrize("how", [{}, {"rounding": "gptq"}, {"max_divergence": 1e9}])
def test_a_transform_makes_inputs_of_each_batch_whenever_it_is_read(how: Any) -> None:
    """The recipe is that of the inputs alone, in every pass over them."""
    labelled = torch.utils.data.DataLoader([(x, i) for i, x in enumerate(batches())], batch_size=1)
    expected = calibrated(Gated().eval(), [x[None] for x in batches()], STATIC, **how)
    found = calibrated(Gated().eval(), labelled, STATIC, transform=lambda b: b[0], **how)
    assert found == expected


@pytest.mark.parametrize(
    ("batch", "phrase"),
    [
        (
            (batches()[0], 1),
            r"a tuple of 2, .*too many positional.*=lambda batch: batch\[0",
        ),
        ({"x": batches()[0], "label": 1}, "a mapping of x, label, .*'label'; give transform"),
    ],
)
def test_batches_that_the_model_does_not_take_are_an_error_that_names_transform(
    batch: Any, phrase: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s)^calibrate: a batch is {phrase}"):
        calibrated(Gated().eval(), [batch])


def test_a_recipe_that_leaves_all_float_says_why() -> None:
    with pytest.warns(UserWarning, match=r"all 3 matmuls stay float: int8 would be .*\(gate, up"):
        recipe = calibrated(Gated().eval(), batches(), qfx.Config(minimum_gain=1e5))
    assert all(site.scheme is None for site in recipe.sites)
