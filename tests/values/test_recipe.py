"""Recipes: values that survive JSON, that must match the model, and that caches keep apart."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import qfx
from qfx import PER_COLUMN, PER_TENSOR, QSpec, Recipe, Scheme, SiteRecipe
from qfx.values.config import parse_options
from qfx.weights.cache import CACHE
from tests.lib.models import compiled
from tests.lib.strategies import PACKED
from tests.rewriting.test_schemes import STATIC, STATIC_ASYMMETRIC, Chain, X, chain_recipe

POSITIVE = st.floats(2.0**-100, 2.0**100, width=32)
SCHEMES = st.builds(
    Scheme,
    st.sampled_from([None, QSpec(), QSpec(bits=7, symmetric=False), STATIC, STATIC_ASYMMETRIC]),
    st.sampled_from([QSpec(), QSpec(bits=4, axes=PER_TENSOR)]),
    st.sampled_from(["float", "int8"]),
    st.sampled_from([0, 16, 64]),
) | st.builds(Scheme, st.just(QSpec(group=32)), st.sampled_from([QSpec(), QSpec(group=32)]))
SCHEMES |= st.builds(Scheme, st.sampled_from([None, QSpec(), STATIC]), PACKED)


@st.composite
def site_recipes(draw: st.DrawFn) -> SiteRecipe:
    scheme, k = draw(st.none() | SCHEMES), draw(st.integers(1, 9))
    columns = st.sets(st.integers(0, k - 1), max_size=k // 4)
    static = scheme is not None and scheme.calibrated
    return SiteRecipe(
        name=draw(st.text(min_size=1, max_size=5)),
        call=draw(st.integers(0, 2)),
        n=draw(st.integers(1, 9)),
        k=k,
        scheme=scheme,
        factor=draw(st.none() | st.tuples(*[POSITIVE] * k)) if scheme else None,
        scale=draw(POSITIVE) if static else None,
        zero_point=draw(st.none() | st.integers(-128, 127))
        if scheme and scheme.x == STATIC_ASYMMETRIC
        else None,
        sqnr_db=draw(st.none() | st.floats(-10, 100)),
        reason=draw(st.text(max_size=5)),
        outliers=tuple(sorted(draw(columns))) if scheme else (),
        divergence=draw(st.none() | st.floats(0, 10)),
    )


@given(st.lists(site_recipes(), max_size=3, unique_by=str))
def test_json_gives_back_an_equal_recipe(sites: list[SiteRecipe]) -> None:
    recipe = Recipe(tuple(sites))
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe and hash(again) == hash(recipe)
    assert len(str(recipe).splitlines()) >= 2


def test_a_recipe_without_outliers_is_read() -> None:
    """As the first builds of this version wrote it."""
    recipe = chain_recipe(Scheme(rotation=64), None)
    raw = json.loads(recipe.to_json())
    for site in raw["sites"]:
        assert not {"rounding", "divergence"} & site.keys()  # which later ones added
        del site["outliers"]
    assert Recipe.from_json(json.dumps(raw)) == recipe


def test_a_file_is_read_as_an_option(tmp_path: Path) -> None:
    path, recipe = tmp_path / "recipe.json", chain_recipe(Scheme(rotation=64), None)
    recipe.save(path)
    assert Recipe.load(path) == recipe
    for option in (recipe, path, str(path)):
        assert parse_options({"recipe": option})[0].recipe == recipe


def test_a_recipe_prints_as_a_table() -> None:
    site = SiteRecipe("a.b", 1, 4, 2, Scheme(x=STATIC), (0.5, 2.0), 0.125, None, 31.4, "measured")
    text = str(Recipe((site, SiteRecipe("c", 0, 4, 2, None, reason="loses too much"))))
    for word in ("a.b[1]", "2x4", "xs8T_ws8r", "0.5 to 2", "0.125", "31.4", "float", "loses too"):
        assert word in text


STATIC_SCHEME = Scheme(x=STATIC)
SITE: dict[str, Any] = {"name": "a", "call": 0, "n": 4, "k": 2}
IMPOSSIBLE = {
    "factor has 3 elements, and K=2 needs 2": {"scheme": Scheme(), "factor": (1.0, 1.0, 1.0)},
    "factor has 1 elements, and K=2 needs 2": {"scheme": Scheme(), "factor": (1.0,)},
    r"factor\[1\]=0.0 must be positive and finite": {"scheme": Scheme(), "factor": (1.0, 0.0)},
    "xs8T_ws8r needs a static scale": {"scheme": STATIC_SCHEME},
    "xs8r_ws8r has no static scale: leave scale=None, not 1.0": {"scheme": Scheme(), "scale": 1.0},
    "scale=1e-40 must be a normal positive float32": {
        "scheme": STATIC_SCHEME,
        "scale": 1e-40,
    },
    "zero_point=128 must be an integer from -128 to 127": {
        "scheme": Scheme(x=STATIC_ASYMMETRIC),
        "scale": 1.0,
        "zero_point": 128,
    },
    "sqnr_db='high' must be a number": {"scheme": Scheme(), "sqnr_db": "high"},
    "sqnr_db=nan must be a number": {"scheme": Scheme(), "sqnr_db": float("nan")},
    "divergence=-0.5 must be a finite number of at least 0": {"scheme": None, "divergence": -0.5},
    "divergence=inf must be a finite number": {"scheme": None, "divergence": float("inf")},
    "divergence=nan must be a finite number": {"scheme": None, "divergence": float("nan")},
    "n=-1 must be an integer of at least 0": {"scheme": Scheme(), "n": -1},
    "scale=inf must be a normal positive": {"scheme": STATIC_SCHEME, "scale": float("inf")},
    "xs8T_ws8r has no static zero point": {"scheme": STATIC_SCHEME, "scale": 1.0, "zero_point": 3},
    "it cannot have a factor or scale": {"scheme": None, "factor": (1.0, 1.0)},
    "computes its factor from the weight: leave factor=None": {
        "scheme": Scheme(w=QSpec(axes=PER_COLUMN)),
        "factor": (1.0, 1.0),
    },
    "it cannot have outliers": {"scheme": None, "outliers": (0,)},
    "outliers 8 must be columns from 0 to K-1=7": {"scheme": Scheme(), "k": 8, "outliers": (8,)},
    "outliers 1, 0 must be in ascending order": {
        "scheme": Scheme(),
        "k": 8,
        "outliers": (1, 0),
    },
    "it has 3 outliers, and at most K/4=2 are allowed": {
        "scheme": Scheme(),
        "k": 8,
        "outliers": (0, 1, 2),
    },
    "leave outliers=": {
        "scheme": Scheme(w=QSpec(axes=PER_COLUMN)),
        "outliers": (0,),
    },
    "xs8C_ws8r needs a factor of K=2 elements": {
        "scheme": Scheme(x=QSpec(axes=PER_COLUMN, static=True)),
        "scale": 1.0,
    },
}


def test_a_predicted_divergence_is_shown() -> None:
    """In a column that is there where a site has one."""
    site = SiteRecipe("a", 0, 2, 2, Scheme(), divergence=0.00125)
    assert "divergence" in (text := str(Recipe((site,)))) and "0.0013" in text.splitlines()[-1]
    assert "divergence" not in str(Recipe((replace(site, divergence=None),)))


@pytest.mark.parametrize("phrase", IMPOSSIBLE)
def test_what_does_not_fit_together(phrase: str) -> None:
    with pytest.raises(ValueError, match=f"recipe of a: .*{phrase}"):
        SiteRecipe(**{**SITE, **IMPOSSIBLE[phrase]})


def _json(**changes: Any) -> str:
    raw = json.loads(chain_recipe(Scheme(), None).to_json())
    raw["sites"][0].update(changes)
    return json.dumps(raw)


TEXTS = {
    "it is not JSON": "{",
    "it has no qfx_recipe version": "[1]",
    "nested too deeply": "[" * 10**5,
    "'sites' stands twice in one object": '{"qfx_recipe": 1, "sites": [], "sites": []}',
    "unknown keys 'more'": '{"qfx_recipe": 1, "sites": [], "more": 1}',
    "version 3, and this qfx reads versions 1 and 2": '{"qfx_recipe": 3, "sites": []}',
    "unknown keys 'codes'": '{"qfx_recipe": 1, "sites": [], "codes": "a"}',
    "unknown fields colour": _json(colour="red"),
    "bits=9 is outside": _json(scheme={"x": None, "w": {"bits": 9, "axes": [1]}}),
    "cannot be read: the key 'w' is missing": _json(scheme={"x": None}),
    "more than one entry for k": _json(name="k"),
}


@pytest.mark.parametrize("phrase", TEXTS)
def test_text_that_is_no_recipe(phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        Recipe.from_json(TEXTS[phrase])


# --- recipe and model ---

RECIPE = chain_recipe(STATIC_SCHEME)


def _with(position: int, **changes: Any) -> Recipe:
    sites = list(RECIPE.sites)
    sites[position] = replace(sites[position], **changes)
    return Recipe(tuple(sites))


MISMATCHES = {
    r"the model has no kk; there is: .*down": {"recipe": _with(1, name="kk")},
    r"up has K=64 and N=96 in the recipe, and K=64 and N=128 in the model": {
        "recipe": _with(2, n=96)
    },
    r"q has K=32 and N=64 in the recipe, and K=64": {"recipe": _with(0, k=32)},
    "the scheme w8a8-static has static scales, which only a recipe": {"scheme": "w8a8-static"},
}


@pytest.mark.parametrize("phrase", MISMATCHES)
def test_a_recipe_of_another_model_is_an_error(phrase: str) -> None:
    ways: list[Callable[[], Any]] = [
        lambda: qfx.rewrite(qfx.trace(Chain(), X), qfx.Config(**MISMATCHES[phrase])),
        lambda: compiled(Chain(), **{"scheme": "w8a8", **MISMATCHES[phrase]})(X),
        lambda: qfx.explain(Chain(), X, options=MISMATCHES[phrase]),
    ]
    for way in ways:
        with pytest.raises(Exception, match=phrase):
            way()


def test_another_type_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"takes a qfx\.Recipe, got 3"):
        parse_options({"recipe": 3})


def test_the_recipe_decides_its_sites_and_the_scheme_the_others() -> None:
    """The cost model, which finds int8 slower here, does not overrule a recipe."""
    up = SiteRecipe("up", 0, 128, 64, None, reason="loses too much")
    recipe = Recipe((*RECIPE.sites[:2], up))
    _, plan = qfx.rewrite(qfx.trace(Chain(), X), qfx.Config(recipe=recipe, skip=("k",)))
    assert [(e.match.name, str(e.scheme or "float")) for e in plan.entries] == [
        *(("q", "xs8T_ws8r"), ("k", "float"), ("up", "float"), ("down", "float"))
    ]
    reasons = [e.reason for e in plan.entries]
    assert reasons[:3] == ["by the recipe", "skipped by the pattern 'k'", "loses too much"]
    assert "below minimum_gain=1.1" in reasons[3]
    static = qfx.Config(scheme="w8a8-static", recipe=recipe)
    _, plan = qfx.rewrite(qfx.trace(Chain(), X), static)
    assert plan.entries[3].reason == "xs8T_ws8r_h64: the recipe does not name it"


def test_calls_of_one_module_have_their_own_recipes() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(self.a(x))

    sites = [SiteRecipe("a", call, 8, 8, STATIC_SCHEME, None, 0.1 + call) for call in (0, 1)]
    gm, plan = qfx.rewrite(
        qfx.trace(Twice(), torch.randn(3, 8)), qfx.Config(recipe=Recipe(tuple(sites)))
    )
    assert [e.recipe and e.recipe.scale for e in plan.entries] == [0.1, 1.1]
    scales = {n: b.item() for n, b in gm.named_buffers() if "static" in n}
    assert sorted(scales.values()) == pytest.approx([0.1, 1.1])


# --- recipes and caches ---


def test_two_recipes_share_compiled_code_but_not_numbers() -> None:
    """Their values are inputs of the graph: the second is served from Inductor's cache on disk."""
    torch.manual_seed(0)
    model = Chain()
    with fresh_cache(), torch.no_grad():
        for i, factor in enumerate((0.5, 1.5)):
            torch._dynamo.reset()
            counters.clear()
            recipe = chain_recipe(Scheme(x=STATIC_ASYMMETRIC, rotation=16), 0.03 * factor, factor)
            gm, _ = qfx.rewrite(qfx.trace(model, X), qfx.Config(recipe=recipe))
            y = compiled(model, recipe=recipe, inner="inductor")(X)
            assert qfx.sqnr(gm(X), y) > 100  # Inductor may round the product otherwise
            assert counters["inductor"]["fxgraph_cache_hit"] == i


def test_recipes_have_their_own_packed_weights_which_follow_the_weight() -> None:
    gc.collect()  # the weights of models that earlier tests left in circles
    torch.manual_seed(0)
    model, before = Chain(), len(CACHE)
    recipes = [chain_recipe(Scheme(), None, factor) for factor in (0.75, 1.5)]
    with torch.no_grad():
        functions = [compiled(model, recipe=recipe) for recipe in recipes]
        for _ in range(2):
            for f, recipe in zip(functions, recipes, strict=True):
                gm, _ = qfx.rewrite(qfx.trace(model, X), qfx.Config(recipe=recipe))
                assert torch.equal(f(X), gm(X))
            model.up.weight.mul_(1.5)
    assert len(CACHE) == before + 8
