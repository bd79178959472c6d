"""quantize_: the linears of a model become int8 modules, in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace as changed
from typing import Any

from torch import nn

from qfx.host.tensors import storage_id
from qfx.io.pages import trim
from qfx.nn.embedding import TABLE, Embedding
from qfx.nn.linear import Linear
from qfx.nn.linear_like import as_linear, is_embedding, is_transposed, sizes_of
from qfx.nn.replace import replace
from qfx.nn.selection import Selection, refuse, select_modules
from qfx.nn.stored_modules import notify_listeners
from qfx.values.config import Config, Configurable
from qfx.values.few_features import why_few_features
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.offload import drop_file_pages
from qfx.weights.smoothing.factors import Factors, factors_without_graph


def quantize_(model: nn.Module, config: Configurable = None) -> nn.Module:
    """Replaces the nn.Linear modules of `model` in place by `qfx.nn.Linear` and returns the model.
    So are transformers' Conv1D, whose weight [K, N] becomes that of a linear, and FalconLinear;
    embeddings become `qfx.nn.Embedding` where `config.embeddings` is "int8".

    The float weights are freed, unless something else refers to them, as a tied embedding does, and
    their memory goes back to the system; of weights that map a file, which other weights of it keep
    mapped, the pages do.
    `config`: a `Config`, or what `Config.of` takes, as "w4a8". Of it count `scheme`, `recipe`,
    `skip` and `only` (patterns of module names), `backward` and `embeddings`; no cost is predicted,
    since the number of tokens is not known.
    Hooks on calls, attributes, and parameters, buffers and children that a linear was given go over
    to the module in its place; a hook that writes `module.weight` no longer changes anything.

    What became of each linear is logged as a table at level INFO. Subclasses of nn.Linear and
    linears of other float types stay, with a warning, and so do those whose weight is sparse or
    empty, holds NaN or infinity, or has K above 65792. Raises ValueError, before anything is
    changed, for a pattern or recipe that does not fit the model, for a model without linears inside
    it, and for linears whose weight is computed before each call (weight_norm, spectral_norm,
    pruning), that have a forward of their own (accelerate), hooks on their state dict, or hooks of
    `register_backward_hook`.
    """
    replace(*_modules(model, Config.of(config)))
    trim()  # here, where nothing refers to the float weights any more
    notify_listeners(model)
    return model


def _modules(model: nn.Module, config: Config) -> tuple[Selection, dict[str, Linear | Embedding]]:
    """What takes the place of which linears and embeddings."""
    found, hows = planned(model, config, "quantize_")
    factors = factors_without_graph(model, "quantize_") if config.smoothing else {}
    each: dict[nn.Module, Linear | Embedding] = {}
    tied: dict[Any, Linear] = {}  # by the float weight, how it lies and how it is quantized
    for m, how in hows.items():
        how = _smoothed(m, how, factors)
        each[m] = module = _made(m, how)
        if isinstance(module, Linear):
            key = id(m._parameters.get("weight")), is_transposed(m), how
            module.weight = tied.setdefault(key, module).weight
    return found, {name: each[m] for name, m in found.taken.items()}


def _made(linear: nn.Module, how: Scheme | SiteRecipe) -> Linear | Embedding:
    module = made(linear, how)
    drop_file_pages(linear.weight)  # type: ignore[arg-type]
    return module


def made(linear: nn.Module, how: Scheme | SiteRecipe) -> Linear | Embedding:
    """What takes the place of this linear or embedding."""
    if is_embedding(linear):
        return Embedding.from_float(linear)
    return Linear.from_float(as_linear(linear), how)


def planned(
    model: nn.Module, config: Config, who: str
) -> tuple[Selection, dict[nn.Module, Scheme | SiteRecipe]]:
    """Which linears and embeddings become int8, and how each is quantized; nothing is changed.

    Raises ValueError, in the name of `who`, where `quantize_` does.
    """
    names = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)

    def decided(linear: nn.Module) -> Scheme | SiteRecipe | None:
        return TABLE if is_embedding(linear) else _decided(config, names[linear])

    def left(linear: nn.Module) -> str:
        return _left_float(decided(linear), linear)

    embeddings = config.embeddings is not None
    found = select_modules(model, config, who, left, transposed=True, embeddings=embeddings)
    refuse(found, Linear.from_float)
    hows = {m: decided(m) for m in dict.fromkeys(found.taken.values())}
    return found, {m: how for m, how in hows.items() if how is not None}


def _left_float(how: Scheme | SiteRecipe | None, linear: nn.Module) -> str:
    if how is None:
        return "the pinned plan does not name it"
    if how is TABLE:
        return ""
    if isinstance(how, Scheme):
        return why_few_features(sizes_of(linear)[0]) or ""
    if how.scheme is not None:
        return ""
    return "the recipe leaves it float" + (f": {how.reason}" if how.reason else "")


def _smoothed(linear: nn.Module, how: Scheme | SiteRecipe, factors: Factors) -> Scheme | SiteRecipe:
    """With the factor of its activation, where no recipe decides. (R4)"""
    weight = as_linear(linear).weight
    n, k = weight.shape
    axis_of_k = 0 if is_transposed(linear) else 1
    factor = factors.get((storage_id(weight) or 0, axis_of_k))
    if factor is None or not isinstance(how, Scheme) or not how.at(k).smooths:
        return how
    return SiteRecipe("", 0, n, k, how.at(k), factor)


def _decided(config: Config, names: Sequence[str]) -> Scheme | SiteRecipe | None:
    """How the linear of these names is quantized; None where a pinned plan has no word of it."""
    sites = [s for s in config.recipe.sites if s.name in names] if config.recipe else []
    if not sites:
        pinned = config.recipe is not None and config.recipe.pinned is not None
        return None if pinned else config.chosen
    if len({changed(s, name="", call=0, sqnr_db=None, reason="") for s in sites}) > 1:
        raise ValueError(
            f"quantize_: the recipe decides differently on the {len(sites)} calls of "
            f"{', '.join(names)}, but a module has one scheme; give the recipe to torch.compile, "
            "or skip this module"
        )
    return sites[0]
