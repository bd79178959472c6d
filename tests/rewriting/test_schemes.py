"""Every kind of scheme through the pass: the canonical, fused and compiled forms have the same
bits, and results and gradients are within what the data imply (B2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qfx
from qfx import PER_COLUMN, PER_TENSOR, QSpec, Recipe, Scheme, SiteRecipe
from qfx.graph.activations import ACTIVATIONS
from qfx.ops.forms import why_no_gradient
from qfx.values.config import PRESETS
from tests.conftest import same_bits
from tests.lib.bounds import U32, UNIT, Known, product, quantization_error, rotation
from tests.lib.models import Applied, compiled
from tests.lib.pairs import covering, every, properties
from tests.lib.strategies import step_error

K, N = 192, 40
ASYMMETRIC = QSpec(symmetric=False)
STATIC = QSpec(axes=PER_TENSOR, static=True)
STATIC_ASYMMETRIC = replace(STATIC, symmetric=False)
COLUMN = QSpec(axes=PER_COLUMN)
STATIC_COLUMN = replace(COLUMN, static=True)
GROUPS4 = QSpec(bits=4, group=64)
GROUPS32 = QSpec(group=32)
PACKED = QSpec(bits=4, group=64, packed=True)
PACKED5 = QSpec(bits=5, symmetric=False, group=128, packed=True)


@dataclass(frozen=True)
class Row:
    """A scheme, and whether a recipe gives it a factor and outliers; a static one always has a
    recipe."""

    scheme: Scheme
    factor: bool = False
    outliers: bool = False

    def why_no_gradient(self, weight_trains: bool) -> str | None:
        split = f"{self.scheme} with outliers in float has no gradient" if self.outliers else None
        return why_no_gradient(self.scheme, weight_trains) or split

    def __str__(self) -> str:
        return f"{self.scheme}{'-factor' * self.factor}{'-outliers' * self.outliers}"


ROWS = [Row(s) for s in PRESETS.values() if not s.calibrated]
ROWS += [
    Row(Scheme(rotation=64)),
    Row(Scheme(x=ASYMMETRIC, rotation=16)),
    Row(Scheme(rotation=64), factor=True),
    Row(Scheme(x=QSpec(axes=PER_TENSOR), w=QSpec(axes=PER_TENSOR)), factor=True),
    Row(Scheme(w=COLUMN)),
    Row(Scheme(w=replace(COLUMN, bits=4), rotation=16)),
    Row(Scheme(x=ASYMMETRIC, w=COLUMN, rotation=64)),
    Row(Scheme(x=None, rotation=64), factor=True),
    Row(Scheme(x=None, w=COLUMN)),
    Row(Scheme(x=None, w=QSpec(bits=4, axes=PER_TENSOR))),
    Row(Scheme(w=ASYMMETRIC)),
    Row(Scheme(x=ASYMMETRIC, w=QSpec(bits=4, symmetric=False, group=128), rotation=64)),
    Row(Scheme(w=GROUPS4, rotation=16), factor=True),
    Row(Scheme(x=STATIC)),
    Row(Scheme(x=STATIC_ASYMMETRIC)),
    Row(Scheme(x=STATIC, rotation=64)),
    Row(Scheme(x=STATIC_ASYMMETRIC, rotation=64), factor=True),
    Row(Scheme(x=STATIC_COLUMN), factor=True),
    Row(Scheme(x=STATIC_ASYMMETRIC, w=GROUPS4), factor=True),
    Row(Scheme(x=GROUPS32)),
    Row(Scheme(x=replace(ASYMMETRIC, group=64), w=ASYMMETRIC, rotation=64), factor=True),
    Row(Scheme(x=QSpec(group=128), w=QSpec(group=128)), factor=True),
    Row(Scheme(x=GROUPS32, w=replace(GROUPS4, group=32, symmetric=False), rotation=16)),
    Row(Scheme(x=ASYMMETRIC, w=PACKED, rotation=16), factor=True),
    Row(Scheme(x=QSpec(group=128), w=PACKED5)),
    Row(Scheme(x=STATIC_ASYMMETRIC, w=PACKED5, rotation=64), factor=True),
    Row(Scheme(x=None, w=PACKED, rotation=64), factor=True),
    Row(Scheme(backward="int8", rotation=64)),
    Row(Scheme(), outliers=True),
    Row(Scheme(x=ASYMMETRIC, rotation=64), factor=True, outliers=True),
    Row(Scheme(x=ASYMMETRIC, w=GROUPS4, rotation=16), outliers=True),
    Row(Scheme(x=GROUPS32, w=GROUPS32, rotation=64), outliers=True),
    Row(Scheme(w=PACKED, rotation=64), outliers=True),
    Row(Scheme(x=None, w=PACKED5), outliers=True),
    Row(Scheme(x=STATIC, rotation=64), outliers=True),
    Row(Scheme(x=STATIC_COLUMN), factor=True, outliers=True),
    Row(Scheme(x=None, rotation=64), outliers=True),
]
ROWS = list(dict.fromkeys(ROWS))
# Those that have, between them, every property of any.
VARIED = covering(ROWS, properties)


class Case:
    """One linear with what a row says, and what it does exactly."""

    def __init__(self, row: Row, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.row, self.scheme, self.dtype = row, row.scheme, dtype
        self.model = nn.Linear(K, N).to(dtype)
        self.x = torch.randn(5, K)
        self.x[:, 3] *= 30
        self.x = self.x.to(dtype)
        self.given = torch.rand(K) + 0.5 if row.factor else None
        self.outliers = (3, 100) if row.outliers else ()
        self.turn = rotation(self.scheme.block(K), K)
        self.factor = self._factor()
        x, w = (self._kept(t) for t in (self.x, self.model.weight))
        self.x_exact = self._rotated(x * self.factor)
        self.w_exact = self._rotated(w / self.factor)
        self.scale = float(torch.tensor(self._range() / 120)) if self.scheme.calibrated else None
        asymmetric = self.scheme.calibrated and self.scheme.x and not self.scheme.x.symmetric
        self.zero = -3 if asymmetric else None

    def _factor(self) -> Tensor:
        if self.scheme.w.axes == PER_COLUMN:
            largest = self.model.weight.detach().float().abs().amax(0)
            return (largest / (2 ** (self.scheme.w.bits - 1) - 1)).double()
        return torch.ones(K).double() if self.given is None else self.given.double()

    def _kept(self, t: Tensor) -> Tensor:
        """Without the outliers. (R3)"""
        kept = t.detach().double()
        kept[:, list(self.outliers)] = 0
        return kept

    def _range(self) -> float:
        return float(self.x_exact.v.abs().max())

    def _rotated(self, v: Tensor) -> Known:
        """(B4), and one rounding for a division."""
        rounding = (v.abs() @ self.turn.abs()) * 9 * U32
        return Known(v @ self.turn, rounding)

    @property
    def recipe(self) -> Recipe | None:
        if self.given is None and self.scale is None and not self.outliers:
            return None
        factor = None if self.given is None else tuple(self.given.tolist())
        rest = (N, K, self.scheme, factor, self.scale, self.zero)
        return Recipe((SiteRecipe("linear", 0, *rest, outliers=self.outliers),))

    @property
    def options(self) -> dict[str, Any]:
        recipe = self.recipe
        return {"recipe": recipe} if recipe else {"scheme": self.scheme}

    def errors(self) -> tuple[Tensor, Tensor]:
        """How far the operands' codes are from the exact operands."""
        x, w = self.x_exact, self.w_exact
        e_x = torch.zeros_like(x.v) if self.scheme.x is None else self._of_x(self.scheme.x)
        spec = self.scheme.w
        if spec.axes == PER_COLUMN:
            spec = replace(spec, axes=PER_TENSOR)
        return x.e + e_x, w.e + _in_groups(spec, w)

    def _of_x(self, spec: QSpec) -> Tensor:
        if not spec.static:
            return _in_groups(spec, self.x_exact)
        assert self.scale is not None  # chosen so that nothing is clipped
        return step_error(torch.tensor(self.scale), 8, spec.symmetric).expand(5, K)

    def bound(self) -> Tensor:
        e_x, e_w = self.errors()
        x, w = Known(self.x_exact.v, e_x), Known(self.w_exact.v, e_w)
        none = torch.zeros(N).double()
        bias = Known(self.model.bias.detach().double(), none)
        found = _linear_error(self.dtype, x, w, bias)
        if not self.outliers:
            return found
        few = (t.detach().double()[:, list(self.outliers)] for t in (self.x, self.model.weight))
        return found + _linear_error(
            self.dtype, *(Known(t, t * 0) for t in few), Known(none, none)
        )  # (B6)


def _in_groups(spec: QSpec, t: Known) -> Tensor:
    size = spec.group or K
    cut = [Known(v, e) for v, e in zip(t.v.split(size, 1), t.e.split(size, 1), strict=True)]
    flat = replace(spec, group=0, packed=False)
    return torch.cat([quantization_error(flat, part, (1,)) for part in cut], 1) * _of_halves(spec)


def _of_halves(spec: QSpec) -> float:
    """Scales in bfloat16 are longer by 2^-9 at most, or shorter, and then the ends of the range are
    clipped by so many of their steps. (Q14)"""
    return (1 + 2.0**-9) * (1 + 2.0**-8 * 2**spec.bits) if spec.packed else 1.0


def _linear_error(dtype: torch.dtype, x: Known, w: Known, bias: Known) -> Tensor:
    return product(UNIT[dtype], lambda a, b, c: a @ b.t() + c, x, w, bias, x.v.shape[1])


class Alone(nn.Module):
    """A linear under a name."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("row, dtype", every(ROWS, DTYPES), ids=str)
def test_forms_have_the_same_bits_within_the_bound(row: Row, dtype: torch.dtype) -> None:
    case = Case(row, dtype)
    model = Alone(case.model)
    config = qfx.Config(minimum_gain=0, **case.options)
    gm = qfx.trace(model, case.x)
    (canonical, plan), (fused, _) = (qfx.rewrite(gm, config, canonical=c) for c in (True, False))
    assert [e.scheme for e in plan.entries] == [row.scheme]
    with torch.no_grad():
        y = fused(case.x)
        assert same_bits(canonical(case.x), y)
        assert same_bits(compiled(model, **case.options)(case.x), y)
        exact = F.linear(*(t.double() for t in (case.x, case.model.weight, case.model.bias)))
    assert ((y.double() - exact).abs() <= case.bound()).all()
    assert not torch.equal(y, model(case.x))


TRAINING = [row for row in ROWS if not row.why_no_gradient(False) and row.scheme.backward != "int8"]


WITH_WEIGHT = [row for row in TRAINING if not row.why_no_gradient(True)]
TRAINED = [(r, False) for r in WITH_WEIGHT] + [(r, True) for r in covering(TRAINING, properties)]


@pytest.mark.parametrize(("row", "frozen"), TRAINED, ids=str)
def test_gradients_are_within_the_bound_of_their_operands(row: Row, frozen: bool) -> None:
    """dx = G w^ and dw = G^T x^, both taken back through the transform. (T1) (R1)"""
    case = Case(row, torch.float32)
    model = Alone(case.model)
    model.linear.weight.requires_grad_(not frozen)
    g = torch.randn(5, N)
    found = []
    for f in (compiled(model, **case.options), _rewritten(model, case)):
        x = case.x.clone().requires_grad_()
        f(x).backward(g)
        found.append([x.grad, model.linear.weight.grad])
        model.linear.weight.grad = None
    dx, dw = found[0]
    assert dx is not None and (frozen or torch.equal(dw, found[1][1]))
    assert torch.equal(dx, found[1][0])
    e_x, e_w = case.errors()
    weight, magnitudes = case.model.weight.detach().double(), g.double().abs()
    terms = magnitudes @ (case.w_exact.v.abs() + e_w)
    bound = (magnitudes @ e_w + (N + 32) * U32 * terms) @ case.turn.abs().t() * case.factor
    assert ((dx.double() - g.double() @ weight).abs() <= bound).all()
    if not frozen:
        terms = magnitudes.t() @ (case.x_exact.v.abs() + e_x)
        bound = (magnitudes.t() @ e_x + (N + 32) * U32 * terms) @ case.turn.abs().t() / case.factor
        assert ((dw.double() - g.double().t() @ case.x.double()).abs() <= bound).all()


def _rewritten(model: nn.Module, case: Case) -> nn.Module:
    config = qfx.Config(minimum_gain=0, **case.options)
    return qfx.rewrite(qfx.trace(model, case.x), config, training=True)[0]


WITHOUT = covering([row for row in ROWS if row.why_no_gradient(True)], properties)


@pytest.mark.parametrize("row", WITHOUT, ids=str)
def test_what_has_no_gradient_stays_float_where_gradients_are_recorded(row: Row) -> None:
    case = Case(row, torch.float32)
    model = Alone(case.model)
    assert torch.equal(compiled(model, **case.options)(case.x), model(case.x))
    config = qfx.Config(minimum_gain=0, **case.options)
    _, plan = qfx.rewrite(qfx.trace(model, case.x), config, training=True)
    assert plan.entries[0].reason == row.why_no_gradient(True)


def _split(outliers: tuple[int, ...], x: Tensor, *more: nn.Module) -> tuple[nn.Module, Any]:
    """A linear of 128 features, then `more`, and it with these columns in float."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 32), *more)
    site = SiteRecipe("0", 0, 32, 128, Scheme(x=ASYMMETRIC, rotation=64), outliers=outliers)
    return model, compiled(model, recipe=Recipe((site,)))


def test_two_huge_channels_cost_no_accuracy_once_they_are_outliers() -> None:
    """The others are quantized as if they were not there: their noise is the same to the bit."""
    x = torch.randn(9, 128)
    huge, gone = x.clone(), x.clone()
    huge[:, [5, 77]] *= 1000
    gone[:, [5, 77]] = 0
    noises = []
    for outliers, given in (((5, 77), huge), ((5, 77), gone), ((), huge)):
        model, f = _split(outliers, given)
        with torch.no_grad():
            y = f(given)
            exact = model.double()(given.double())
        noises.append(y - exact)
    split, alone, whole = noises
    # what differs is the float32 sum of the two products
    assert ((split - alone).abs() <= 16 * U32 * huge.abs().amax()).all()
    assert whole.norm() > 10 * split.norm()


@pytest.mark.parametrize("name", list(ACTIVATIONS)[1:])
def test_the_activation_of_a_split_site_sees_the_sum(name: str) -> None:
    activation = Applied(ACTIVATIONS[name].reference)
    x = 10 * torch.randn(9, 128)
    f, g = (_split((5, 77), x, *more)[1] for more in ((activation,), ()))
    with torch.no_grad():
        assert torch.equal(f(x), activation(g(x)))


def test_the_plan_says_how_much_of_a_site_stays_float() -> None:
    config = qfx.Config(recipe=Case(ROWS[-1], torch.float32).recipe)
    model = Alone(nn.Linear(K, N))
    (entry,) = qfx.rewrite(qfx.trace(model, torch.randn(5, K)), config)[1].entries
    assert entry.reason == "by the recipe; 2 of 192 features in float"


class Chain(nn.Module):
    """Two readers of x, a product, and a chain whose middle nobody else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.q(x) * self.k(x))))


def chain_recipe(scheme: Scheme, scale: float | None = 0.02, factor: float | None = None) -> Recipe:
    """The same scheme for all linears of a Chain, q and k with one factor."""
    sizes = {"q": (64, 64), "k": (64, 64), "up": (128, 64), "down": (32, 128)}
    factors = {n: None if factor is None else (factor,) * k for n, (_, k) in sizes.items()}
    given = ((n, 0, *size, scheme, factors[n], scale) for n, size in sizes.items())
    return Recipe(tuple(SiteRecipe(*site) for site in given))


def _operators(gm: torch.fx.GraphModule) -> list[str]:
    return [n.target._opname for n in gm.graph.nodes if "qfx" in str(n.target)]


X = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))


def test_a_static_chain_stays_in_codes() -> None:
    torch.manual_seed(0)
    model = Chain()
    config = qfx.Config(recipe=chain_recipe(Scheme(x=STATIC)))
    (first, _), (second, _) = (
        qfx.rewrite(qfx.trace(model, X), config, canonical=c) for c in (True, False)
    )
    assert _operators(second) == [
        *("quantize", "linear", "linear"),  # q and k share codes
        *("quantize", "linear_requantize", "linear"),
    ]
    with torch.no_grad():
        assert same_bits(first(X), second(X))
        assert same_bits(compiled(model, recipe=config.recipe)(X), second(X))
    assert [n for n, _ in second.named_buffers() if "static" in n] == ["linear_static_scale"]


NOT_IN_CODES = {
    "rotated": (chain_recipe(Scheme(x=STATIC, rotation=64)), torch.float32),
    "scaled": (chain_recipe(Scheme(x=STATIC), factor=1.5), torch.float32),
    "rounded to half": (chain_recipe(Scheme(x=STATIC)), torch.bfloat16),
}


@pytest.mark.parametrize("name", NOT_IN_CODES)
def test_what_is_done_to_floats_between_is_done(name: str) -> None:
    recipe, dtype = NOT_IN_CODES[name]
    torch.manual_seed(0)
    model, x = Chain().to(dtype), X.to(dtype)
    first, second = (
        qfx.rewrite(qfx.trace(model, x), qfx.Config(recipe=recipe), canonical=c)[0]
        for c in (True, False)
    )
    assert "linear_requantize" not in _operators(second)
    with torch.no_grad():
        assert same_bits(first(x), second(x))


SHARING = {
    "the same": (Scheme(rotation=16), Scheme(rotation=16), 1),
    "another rotation": (Scheme(rotation=16), Scheme(rotation=64), 2),
    "another symmetry": (Scheme(rotation=16), Scheme(x=ASYMMETRIC, rotation=16), 2),
    "another weight": (Scheme(rotation=16), Scheme(w=QSpec(bits=4), rotation=16), 1),
    "a factor of the weight": (Scheme(w=COLUMN), Scheme(w=COLUMN), 2),
}


@pytest.mark.parametrize("name", SHARING)
def test_codes_are_shared_by_all_that_makes_them(name: str) -> None:
    q, k, expected = SHARING[name]
    sites = tuple(SiteRecipe(n, 0, 64, 64, s) for n, s in (("q", q), ("k", k)))
    config = qfx.Config(recipe=Recipe(sites), only=("q", "k"))
    gm, _ = qfx.rewrite(qfx.trace(Chain(), X), config, canonical=True)
    assert _operators(gm).count("quantize") == expected


@pytest.mark.parametrize("factors", [(1.5, 1.5, 1), (1.5, 1.25, 2)])
def test_codes_are_shared_where_factors_are_equal(factors: tuple[float, float, int]) -> None:
    *values, expected = factors
    sites = tuple(
        SiteRecipe(n, 0, 64, 64, Scheme(), (value,) * 64)
        for n, value in zip("qk", values, strict=True)
    )
    config = qfx.Config(recipe=Recipe(sites), only=("q", "k"))
    gm, _ = qfx.rewrite(qfx.trace(Chain(), X), config)
    assert _operators(gm) == (["linears"] if expected == 1 else ["linear_dynamic"] * 2)
    assert len([n for n, _ in gm.named_buffers() if "factor" in n]) == expected


@pytest.mark.parametrize("scales", [(0.02, 0.02, 1), (0.02, 0.03, 2)])
def test_codes_are_shared_where_static_scales_are_equal(scales: tuple[float, float, int]) -> None:
    *values, expected = scales
    sites = tuple(
        SiteRecipe(n, 0, 64, 64, Scheme(x=STATIC), scale=value)
        for n, value in zip("qk", values, strict=True)
    )
    config = qfx.Config(recipe=Recipe(sites), only=("q", "k"))
    gm, _ = qfx.rewrite(qfx.trace(Chain(), X), config)
    assert _operators(gm).count("quantize") == expected


def test_codes_are_not_shared_by_two_views_of_an_activation() -> None:
    """x @ a.T and b @ x read the rows of x and its columns."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b.weight @ x

    torch.manual_seed(0)
    model, x = Both(), torch.randn(8, 8)
    with torch.no_grad():
        right, left = compiled(model)(x)
        assert same_bits(right, compiled(model.a)(x))
        assert same_bits(left, compiled(model.b)(x.t()).t().contiguous())


@pytest.mark.parametrize(
    "scheme", [Scheme(x=STATIC, rotation=64), Scheme(x=STATIC, w=GROUPS4)], ids=str
)
def test_constants_reach_the_bodies_of_checkpoints(scheme: Scheme) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Chain()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, x, use_reentrant=False)

    torch.manual_seed(0)
    model = Checkpointed()
    made = chain_recipe(scheme, factor=1.5)
    plain = Recipe(tuple(replace(s, outliers=(2, 7)) for s in made.sites))
    named = Recipe(tuple(replace(s, name=f"inside.{s.name}") for s in plain.sites))
    with torch.no_grad():
        expected = compiled(model.inside, recipe=plain)(X)
        assert same_bits(compiled(model, recipe=named)(X), expected)
        assert not torch.equal(expected, model(X))


@pytest.mark.parametrize("row", VARIED, ids=str)
def test_explain_runs_the_same_operators(row: Row) -> None:
    case = Case(row, torch.float32)
    model = Alone(case.model)
    (found,) = qfx.explain(model, case.x, options={"minimum_gain": 0, **case.options}).rows
    with torch.no_grad():
        noisy = compiled(model, **case.options)(case.x)
        assert found.sqnr_db == qfx.sqnr(model(case.x), noisy)
    assert found.scheme == str(row.scheme) and found.measured
