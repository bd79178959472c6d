"""Recipes for blocks of experts: what a recipe says about each of the two products of a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from qfx.nn.experts_like import products_of, why_no_experts_scheme
from qfx.ops.packing import Packing
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.recipe_codes import codes_of

How = Scheme | SiteRecipe


class ExpertsHow(NamedTuple):
    """The ways in which the two products of a block of experts are quantized, in their order."""

    up: How
    down: How


def why_float(module: nn.Module, how: ExpertsHow) -> str:
    """Returns why the recipe leaves a block of experts float, which has one module for both
    products; '' if it does not."""
    for product, each in zip(products_of(module), how, strict=True):
        if isinstance(each, SiteRecipe) and each.scheme is None:
            return f"the recipe leaves {product.name} float" + (
                f": {each.reason}" if each.reason else ""
            )
    return ""


def why_not_by_recipe(how: ExpertsHow) -> str:
    """Returns why experts cannot be quantized in this way; '' if they can be."""
    return next(filter(None, map(_fault, how)), "")


def _fault(how: How) -> str:
    scheme = how.scheme if isinstance(how, SiteRecipe) else how
    if isinstance(how, SiteRecipe) and (how.factor is not None or how.outliers):
        return (
            f"the recipe of {how} has a factor or outliers, and experts have no operator for them"
        )
    return "" if scheme is None else why_no_experts_scheme(scheme)


def check_recipe(module: nn.Module, how: ExpertsHow) -> None:
    """Raises ValueError if a recipe is for another shape or for other weights than those of the
    block. Reads the weights only if the recipe has codes for them."""
    for _ in _codes(module, how):
        pass


def _codes(module: nn.Module, how: ExpertsHow) -> Iterator[Tensor]:
    for product, each in zip(products_of(module), how, strict=True):
        if isinstance(each, SiteRecipe):
            packing = packing_of(each, product.weights)
            if packing.rounding is not None:
                yield codes_of(product.weights, packing, packing.rounding)


def packing_of(how: SiteRecipe, weights: Tensor) -> Packing:
    """Returns how the weights [E, N, K] of a product are stored. Raises ValueError if the recipe is
    for another shape."""
    count, n, k = weights.shape
    if (how.n, how.k) != (n, k) or len(how.tokens or ()) not in (0, count):
        experts = f" of {len(how.tokens)} experts" if how.tokens else ""
        raise ValueError(
            f"Experts: the recipe of {how} is for N={how.n} K={how.k}{experts}, the weights have "
            f"N={n} K={k} of {count} experts"
        )
    assert how.scheme is not None
    scheme = how.scheme.at(k)
    return Packing(scheme.w, rotation=scheme.rotation, rounding=how.rounding, group=scheme.group)
