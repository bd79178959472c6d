"""quantize_: replaces the linears of a model by int8 modules, in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace as changed
from functools import partial
from typing import Any

from torch import nn

from qfx.host.tensors import storage_id
from qfx.io.pages import trim
from qfx.nn.conv import Conv
from qfx.nn.conv_like import is_convolution
from qfx.nn.embedding import TABLE, Embedding
from qfx.nn.experts import Experts
from qfx.nn.experts_like import is_experts, products_of, with_count
from qfx.nn.experts_recipe import ExpertsHow, check_recipe, why_float, why_not_by_recipe
from qfx.nn.linear import Linear
from qfx.nn.linear_like import as_linear, is_embedding, is_transposed, sizes_of
from qfx.nn.recurrent_like import pairs_of_linears, why_no_recurrence
from qfx.nn.recurrent_opening import opened_recurrent
from qfx.nn.replace import replace
from qfx.nn.selection import Selection, refuse, select_modules
from qfx.nn.stored_modules import notify_listeners
from qfx.values.config import Config, Configurable
from qfx.values.limits import why_few_features, why_few_inputs
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.offload import drop_file_pages
from qfx.weights.smoothing.factors import Factors, factors_without_graph


def quantize_(model: nn.Module, config: Configurable = None) -> nn.Module:
    """Replaces the nn.Linear modules of `model` in place by `qfx.nn.Linear` and returns the model.

    The convolutions of torch.nn, also transposed ones, become `qfx.nn.Conv`; those of groups of
    channels with fewer than 8 outputs each, and transposed groups, stay float. FalconLinear and
    Conv1D of transformers are replaced too; the weight [K, N] of a Conv1D becomes the weight of a
    linear. nn.LSTM, nn.GRU, nn.LSTMCell and nn.GRUCell become those of `qfx.nn`, with an int8
    linear for each of their weights (`rnn.ih_l0` of the input, `rnn.hh_l0` of the state), if one of
    these becomes int8; that of an input with fewer than 64 features stays float. Blocks of experts
    become `qfx.nn.Experts`, and their routers stay float. Embeddings become `qfx.nn.Embedding` if
    `config.embeddings` is "int8".

        qfx.quantize_(model, "w8a8")

    The float weights are freed, unless something else refers to them, such as a tied embedding, and
    their memory is returned to the system. For a weight that maps a file which other weights keep
    mapped, its pages are returned. Those of experts are freed one product after the other while the
    model is quantized, so that a model whose memory runs out on the way cannot be used any more.

    `config`: a `Config`, or a value that `Config.of` accepts, such as "w4a8". The options `scheme`,
    `recipe`, `skip` and `only` (patterns of module names), `backward`, `embeddings` and `smoothing`
    have an effect. No cost is predicted, because the number of tokens is not known.

    Hooks on calls, attributes, and parameters, buffers and children that users added to a linear
    are transferred to the new module. A hook that writes `module.weight` no longer has an effect.

    The result for each linear is logged as a table at level INFO. Subclasses of nn.Linear and
    linears of other float dtypes stay, with a warning, and so do those whose weight is sparse or
    empty, contains NaN or infinity, or has K above 65792. Experts stay, with a warning, if they
    have a gate that the operator `experts` does not have, or the scheme is not for them.

    Raises ValueError, before anything is changed, for a pattern or recipe that does not fit the
    model, for a model without linears inside it, and for linears whose weight is computed before
    each call (weight_norm, spectral_norm, pruning), that have a forward of their own (accelerate),
    hooks on their state dict, or hooks of `register_backward_hook`.
    """
    with opened_recurrent(model):
        replace(*_modules(model, Config.of(config)))
    trim()  # nothing refers to the float weights any more
    notify_listeners(model)
    return model


def _modules(
    model: nn.Module, config: Config
) -> tuple[Selection, dict[str, Linear | Conv | Embedding | Experts]]:
    """Returns the selection, and the new module for each name that is replaced."""
    found, hows = planned(model, config, "quantize_")
    factors = factors_without_graph(model, "quantize_") if config.smoothing else {}
    for m, how in hows.items():
        if isinstance(how, ExpertsHow):
            check_recipe(m, how)  # before the first float weight is freed
    each: dict[nn.Module, Linear | Conv | Embedding | Experts] = {}
    tied: dict[Any, Linear | Conv] = {}  # by the float weight, how it is read and quantized
    for m, how in sorted(hows.items(), key=lambda item: is_experts(item[0])):  # these free floats
        if is_experts(m):
            assert isinstance(how, ExpertsHow)
            each[m] = Experts.from_float(m, how, free=True)
            continue
        assert not isinstance(how, ExpertsHow)
        how = _smoothed(m, how, factors)
        each[m] = module = _made(m, how)
        if isinstance(module, Linear | Conv):
            key = id(m._parameters.get("weight")), _reading(m, module), how
            module.weight = tied.setdefault(key, module).weight
    return found, {name: each[m] for name, m in found.taken.items()}


def _reading(before: nn.Module, module: Linear | Conv) -> Any:
    """Returns how the float weight of `before` is read as a matrix, for comparisons."""
    return module.views.windows.weight if isinstance(module, Conv) else is_transposed(before)


def _made(linear: nn.Module, how: Scheme | SiteRecipe) -> Linear | Conv | Embedding:
    module = made(linear, how)
    drop_file_pages(linear.weight)  # type: ignore[arg-type]
    return module


def made(linear: nn.Module, how: Scheme | SiteRecipe) -> Linear | Conv | Embedding:
    """Returns the module that replaces this linear, convolution or embedding."""
    if is_convolution(linear):
        return Conv.from_float(linear, how)
    if is_embedding(linear):
        return Embedding.from_float(linear)
    return Linear.from_float(as_linear(linear), how)


def planned(model: nn.Module, config: Config, who: str) -> tuple[Selection, dict[nn.Module, Any]]:
    """Decides which linears, embeddings and experts become int8 and how each is quantized: by a
    Scheme or SiteRecipe, experts by an ExpertsHow. Changes nothing.

    Raises ValueError in the same cases as `quantize_`. Its message begins with `who`, the name of
    the function that the user called.
    """
    names = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)

    def decided(linear: nn.Module) -> Scheme | SiteRecipe | ExpertsHow | None:
        if is_experts(linear):
            parts = (
                [f"{name}.{product.name}" for name in names[linear]]
                for product in products_of(linear)
            )
            up, down = (_decided(config, part) for part in parts)
            return None if up is None or down is None else ExpertsHow(up, down)
        return TABLE if is_embedding(linear) else _decided(config, names[linear])

    def left(linear: nn.Module) -> str:
        return _left_float(decided(linear), linear, names[linear])

    of_states = {model.get_submodule(name) for _, name in pairs_of_linears(model)}

    def fault_of_scheme(linear: nn.Module) -> str:
        if linear in of_states:
            return why_no_recurrence(_decided(config, names[linear]))
        how = decided(linear) if is_experts(linear) else None
        return with_count(linear, why_not_by_recipe(how)) if isinstance(how, ExpertsHow) else ""

    embeddings = config.embeddings is not None
    found = select_modules(
        model, config, who, left,
        transposed=True, embeddings=embeddings, experts=True, convolutions=True, recurrent=True,
        fault_of_scheme=fault_of_scheme,
    )  # fmt: skip
    refuse(found, partial(made, how=Scheme()))
    hows = {m: decided(m) for m in dict.fromkeys(found.taken.values())}
    return found, {m: how for m, how in hows.items() if how is not None}


def _left_float(
    how: Scheme | SiteRecipe | ExpertsHow | None, linear: nn.Module, names: Sequence[str]
) -> str:
    if how is None:
        return "the pinned plan does not name it"
    if isinstance(how, ExpertsHow):
        return why_float(linear, how)
    if how is TABLE:
        return ""
    if isinstance(how, Scheme):
        k, _ = sizes_of(linear)
        return why_few_features(k) or why_few_inputs(k, names) or ""
    if how.scheme is not None:
        return ""
    return "the recipe leaves it float" + (f": {how.reason}" if how.reason else "")


def _smoothed(linear: nn.Module, how: Scheme | SiteRecipe, factors: Factors) -> Scheme | SiteRecipe:
    """Returns `how` with the smoothing factor [K] for the input of this linear added, if there is
    one and `how` is not from a recipe. Equation (R4)."""
    if is_convolution(linear):
        return how  # factors are of what a norm gives to linears
    weight = as_linear(linear).weight
    n, k = weight.shape
    axis_of_k = 0 if is_transposed(linear) else 1
    factor = factors.get((storage_id(weight) or 0, axis_of_k))
    if factor is None or not isinstance(how, Scheme) or not how.at(k).smooths:
        return how
    return SiteRecipe("", 0, n, k, how.at(k), factor)


def _decided(config: Config, names: Sequence[str]) -> Scheme | SiteRecipe | None:
    """Returns how the linear with these names is quantized: the entry of the recipe, or else the
    scheme of `config`. Returns None if the recipe is a pinned plan without such an entry."""
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
