"""`pin`: records which matmuls of a model run in int8 on this machine, as a recipe that makes every
machine decide the same.

Which matmuls run in int8 depends on times measured on a machine, so two machines may compute
different numbers. A pinned plan leaves no such decision to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from qfx.cost.device_models import current_costs
from qfx.cost.spending import unlimited
from qfx.dynamo_backend.captured_graphs import watch
from qfx.host.shapes import hint
from qfx.io.errors import UserError
from qfx.match.experts import ExpertProduct
from qfx.match.selection import keyed_experts, keyed_products, keyed_sites
from qfx.match.site import Site
from qfx.pipeline import Context, run_passes
from qfx.plan.plan import Entry, Plan
from qfx.values.config import Configurable, parse_options
from qfx.values.recipe import Recipe
from qfx.values.site_recipe import PinnedProduct, SiteRecipe
from qfx.weights.model_restore import unchanged

Value = TypeVar("Value", SiteRecipe, PinnedProduct)


def pin(
    model: Callable[..., Any],
    *inputs: Any,
    options: Configurable = None,
    **keyword_inputs: Any,
) -> Recipe:
    """Returns the decisions of this machine on the matmuls of `model(*inputs, **keyword_inputs)` as
    a Recipe. The model runs once, in float.

        recipe = qfx.pin(model, inputs)
        recipe.save("plan.json")

    Given as the option `recipe`, the result makes every machine decide the same; matmuls that are
    not in it stay float. `Recipe.save` writes it to a file.

    `options`: those of the backend; a recipe among them is included in the result. A matmul with a
    dynamic size gets the decision for the size in these inputs. The model and the default random
    generators are restored, as after `qfx.explain`. Raises ValueError for a wrong option, if no
    graph was captured, if a weight has no known size, and if two graphs decide a matmul of the same
    name differently.
    """
    config, _ = parse_options(options)
    costs, plans = current_costs(), list[Plan]()

    def look(gm: fx.GraphModule, here: Mapping[str, str], arguments: Sequence[Any]) -> Any:
        context = Context(config, costs, here, around=None)
        plans.append(run_passes(gm, context, "decide").plan)
        return gm(*arguments)

    with unchanged(model, "pin"), unlimited():  # a plan that stays follows this machine's times
        watch(model, look, *inputs, dynamic=False, **keyword_inputs)
    if not plans:
        raise UserError("pin: no graph was captured, see qfx.explain(model, *inputs)")
    sites = _once([site for plan in plans for site in _sites(plan)])
    return Recipe(sites, _once([product for plan in plans for product in _products(plan)]))


def _sites(plan: Plan) -> list[SiteRecipe]:
    entries = {entry.match.node: entry for entry in plan.entries}
    matches = [entry.match for entry in plan.entries]
    return [
        _site(name, call, site, entries[site.node])
        for (named, call), site in keyed_sites(matches)
        for name in (named, *site.alike)
    ] + [
        _site(name, call, found, entries[found.node])
        for (name, call), found in keyed_experts(matches)
    ]


def _site(name: str, call: int, site: Site | ExpertProduct, entry: Entry) -> SiteRecipe:
    n, k = hint(site.n), hint(site.k)
    if n is None or k is None:
        raise UserError(f"pin: the weight of {name} has no known size")
    if entry.recipe is not None:
        return replace(entry.recipe, name=name, call=call)
    return SiteRecipe(name, call, n, k, entry.scheme, reason=f"pinned: {entry.reason}")


def _products(plan: Plan) -> list[PinnedProduct]:
    entries = {entry.match.node: entry for entry in plan.entries}
    keyed = keyed_products([entry.match for entry in plan.entries])
    made = ((key, entries[match.node]) for key, match in keyed)
    return [PinnedProduct(*key, entry.scheme, entry.decodes) for key, entry in made]


def _once(values: Sequence[Value]) -> tuple[Value, ...]:
    """Returns each value once. Several graphs may contain the same layer, for other inputs; raises
    UserError if they decide differently on it."""
    found: dict[tuple[str, int], Value] = {}
    for value in values:
        first = found.setdefault((value.name, value.call), value)
        if replace(first, **_IGNORED_FIELDS[type(value)]) != replace(
            value, **_IGNORED_FIELDS[type(value)]
        ):
            raise UserError(
                f"pin: {value} is {first.scheme or 'float'} in one graph and "
                f"{value.scheme or 'float'} in another; pin the model on inputs of one kind, or "
                "decide by skip, only or minimum_gain"
            )
    return tuple(found.values())


_IGNORED_FIELDS: dict[type, dict[str, Any]] = {SiteRecipe: {"reason": ""}, PinnedProduct: {}}
