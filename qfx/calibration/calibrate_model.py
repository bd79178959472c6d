"""`calibrate`: runs a model on batches of inputs and returns a Recipe, which states how each matmul
is quantized."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from tqdm import tqdm

from qfx.calibration.apply_recipe import quantized
from qfx.calibration.batches import Transformed, arguments_of, check_call, parted
from qfx.calibration.budget import by_bytes, by_divergence
from qfx.calibration.choose import Choice, by_error, by_metric
from qfx.calibration.experts import (
    expert_candidates,
    joined,
    units_of,
    warn_of_unseen,
)
from qfx.calibration.goals import check_goal, check_names_of, checked_bytes, ladder_of
from qfx.calibration.losses import Loss
from qfx.calibration.observers import OBSERVERS, step_of
from qfx.calibration.prediction import predicted
from qfx.calibration.recipe_entries import entries
from qfx.calibration.record import Session, SharedInput
from qfx.calibration.rounding import (
    NEAREST,
    ROUNDINGS,
    SEQUENTIAL,
    Chosen,
    all_rounded,
    rounded,
    rounded_in_turn,
)
from qfx.calibration.search import Candidate, candidates
from qfx.calibration.sequential import sequential
from qfx.cost.device_models import current_costs
from qfx.cost.machine import MachineCost
from qfx.cost.spending import unlimited
from qfx.dynamo_backend.captured_graphs import watch
from qfx.match.selection import SiteKey
from qfx.values.config import Config, Configurable
from qfx.values.recipe import Recipe
from qfx.values.scheme import Scheme
from qfx.values.select import check_names, left_out
from qfx.weights.model_restore import in_training, unchanged

Model = Callable[..., Any]
Found = Mapping[SiteKey, Sequence[Candidate]]
At = tuple[SiteKey, int]  # a candidate: the key of its group, and its index there
_SMALLEST_MEMORY = 2**24  # bytes
_MEMORY = 0.125  # the fraction of the bytes of the model's parameters that samples may take
_MOMENTS = 0.25  # the fraction that the second moments of inputs may take


def calibrate(
    model: Model,
    batches: Iterable[Any],
    config: Configurable = None,
    *,
    observer: str = "minmax",
    rounding: str = NEAREST,
    max_sqnr_loss_db: float = 1.0,
    metric: Callable[[Model], float] | None = None,
    max_drop: float = 0.0,
    max_divergence: float | None = None,
    max_bits: float | None = None,
    also: Sequence[str | Scheme] = (),
    loss: Loss | None = None,
    progress: bool = True,
    transform: Callable[[Any], Any] | None = None,
) -> Recipe:
    """Runs `model` on `batches` in float and chooses scheme, smoothing and ranges for each of its
    matmuls.

        recipe = qfx.calibrate(model, batches, "w8a8")
        compiled = torch.compile(model, backend="qfx", options={"recipe": recipe})

    `batches`: inputs, each a tensor, a tuple for `model(*batch)` or a mapping for `model(**batch)`.
    A tensor or a mapping given instead of an iterable is one batch. `transform` converts an element
    of `batches` to a batch; for example `lambda batch: batch[0]` suits a loader of inputs and
    labels.

    `config`: its `scheme` is tried with several strengths of smoothing, and with up to 8 outlying
    features in float. Matmuls of a static preset may fall back to dynamic scales per token.

    `observer`: how static ranges are found: minmax, moving-average, percentile (99.99), mse or
    entropy.

    `rounding`: how the weights of the chosen candidates are rounded to integers. "nearest" rounds
    to nearest. "gptq" loses less on the observed inputs, at no cost in the kernels.
    "gptq-sequential" also compensates a part of the error of the preceding matmuls; it is worth its
    time for low-bit weights, and needs a model that is captured as one graph. The integers are
    valid only for these weights. Each expert of a mixture is rounded for the tokens that it gets,
    by "gptq", or to nearest if it saw fewer than 16. Both gptq methods, and static scales, need
    batches that can be iterated over twice.

    `also`: presets or schemes that are tried in addition to that of the config, so that matmuls
    whose error costs more get more bits.

    The choice is made in one of four ways. By default the result is the fastest choice, according
    to the cost model, whose error is at most `max_sqnr_loss_db` dB above that of the most accurate
    choice. The error of a choice is the sum over matmuls of noise power relative to signal power.
    With `metric(quantized_model) -> float`, where higher is better, it is the fastest choice whose
    metric is at most `max_drop` below that of `model`; matmuls may then stay float.

    With `max_divergence` the result is a fast choice whose matmuls are predicted to change the
    model's output, all together, by at most `max_divergence` (docs/numerics.md (D1)); matmuls may
    stay float. The prediction uses gradients of a `loss`. "labels" draws labels from the
    distribution given by the logits, and the divergence is in nats per prediction. "direction" uses
    a random direction for each row of the output, and the divergence is half of the squared
    relative error, which is 1 - cosine. A function maps the model's output to the loss of each
    prediction; its labels should be the model's own. The default is "labels" if the output has an
    entry `logits`, else "direction". Gradients are taken on the last quarter of the batches, at
    most 8. The model runs these batches again, and "gptq" does not use them. Parameters, their
    gradients and their `requires_grad` stay unchanged.

    With `max_bits` the weights take at most `max_bits` bits per element on average, scales
    included, and the result is the choice found with the least divergence, predicted in the same
    way.

    The model runs in its current mode. In training mode the effects of dropout and batch statistics
    on activations are recorded, and a warning is issued. Batches see the state that earlier ones
    left. After the last batch, and after each call of `metric`, the model and the default random
    generators are restored, as after `qfx.explain`.

    Ctrl-C ends the observation; the batches that were observed count. Memory: samples of at most
    256 rows per activation, in total at most an eighth of the model or 16 MiB; a copy of the
    buffers; for "gptq" the rounded weights, a quarter of the model for second moments and a few
    matrices [K, K] of the largest K; for "gptq-sequential", instead of the quarter, twice the
    tensors that all batches hold at one matmul; for `max_divergence` what one batch keeps for its
    gradients, and for "gptq" the rounded weights of every candidate.

    Raises ValueError if there are no batches, if the model cannot be called with a batch, for a
    pattern that fits nothing, for an unknown observer, rounding or loss, if no graph was captured,
    and if no gradient reaches a matmul.
    """
    config = Config.of(config)
    if isinstance(batches, Tensor | Mapping):
        batches = [batches]  # one batch
    check_names_of(("observer", observer, OBSERVERS), ("rounding", rounding, ROUNDINGS))
    check_goal(max_divergence, max_bits, loss, metric)
    predicts = max_divergence is not None or max_bits is not None
    ladder = ladder_of(config, also)
    again = "static ranges are observed" if any(s.calibrated for s in ladder) else ""
    again = again or ("" if rounding == NEAREST else "codes are found")
    again = again or ("gradients are taken" if predicts else "")
    if again and iter(batches) is batches:
        raise ValueError(
            f"calibrate: {again} in a second pass, but these batches can be read only once; give a "
            "list or a DataLoader"
        )
    if transform is not None:
        batches = Transformed(batches, transform)
    if training := in_training(model):
        warnings.warn(
            f"qfx.calibrate: {training} in training mode: what dropout and batch statistics do is "
            "in what is recorded; call model.eval() first for a recipe for inference",
            stacklevel=2,
        )
    session, memory = Session(), max(_MOMENTS * _parameter_bytes(model), _SMALLEST_MEMORY)
    observe = partial(_observe, model, batches, session, progress)
    count = observe("calibrating")
    groups = _wanted(session, config)
    warn_of_unseen(model, session.groups, lambda name: left_out(config, [name]))
    cost = current_costs().cpu or MachineCost()
    units, how = units_of(groups), (ladder, observer, cost, config.minimum_gain)

    def search(unit: Sequence[SiteKey]) -> Iterable[tuple[SiteKey, list[Candidate]]]:
        each = [groups[key] for key in unit]
        if each[0].product is None:
            return [(unit[0], candidates(each[0], *how))]
        return zip(unit, expert_candidates(each, *how), strict=True)

    with unlimited():  # a calibration takes minutes, and its recipe stays
        shown = tqdm(units, "searching", disable=not progress)
        found = dict(each for unit in shown for each in search(unit))
    ranges = _ranges(found, observer, session, observe)

    def with_codes(chosen: Chosen, seen: Iterable[Any] = batches) -> Chosen:
        if rounding == NEAREST:
            return chosen
        done: dict[SiteKey, Candidate] = {}
        if rounding == SEQUENTIAL:
            alone = {key: group for key, group in groups.items() if group.product is None}
            run = partial(sequential, model, seen, alone, observer, progress)
            done = rounded_in_turn(alone, {key: chosen[key] for key in alone}, observer, run)
        others = {key: candidate for key, candidate in chosen.items() if key not in done}
        if others:
            watching = partial(_observe, model, seen, session, progress)
            done |= rounded(groups, others, "gptq", observer, session, watching, memory)
        return done

    def recipe_of(choice: Choice, finish: Callable[[Chosen], Chosen] = dict) -> Recipe:
        places = {key: i for unit, i in zip(units, choice, strict=True) for key in unit}
        chosen = finish({key: found[key][i] for key, i in places.items()})
        steps = {key: ranges.get(at) for key, at in zip(places, places.items(), strict=True)}
        return Recipe(tuple(entries(groups, units, chosen, steps)))

    if predicts:
        seen, held_out = parted(batches, count)
        found = all_rounded(found, partial(with_codes, seen=seen))
        shown = tqdm(held_out, "gradients", total=len(held_out), disable=not progress)
        found = predicted(model, shown, loss, groups, found, observer)
        each = joined(units, found, groups)
        if max_divergence is not None:
            return recipe_of(by_divergence(each, max_divergence))
        return recipe_of(by_bytes(each, checked_bytes(max_bits, groups, each)))
    if metric is None:
        return _warned_if_float(
            recipe_of(by_error(joined(units, found, groups), max_sqnr_loss_db), with_codes)
        )
    measure = partial(_measured, metric, model)
    wanted = measure(model)

    def drop(choice: Choice) -> float:
        return wanted - measure(quantized(model, replace(config, recipe=recipe_of(choice))))

    return recipe_of(by_metric(joined(units, found, groups), drop, max_drop), with_codes)


def _warned_if_float(recipe: Recipe) -> Recipe:
    """Returns the recipe unchanged. If it leaves every matmul in float, warns with the reasons."""
    if recipe.sites and all(site.scheme is None for site in recipe.sites):
        reasons = defaultdict(list)
        for site in recipe.sites:
            reasons[site.reason or "no scheme is within the bound"].append(str(site))
        each = "; ".join(f"{why} ({', '.join(names[:5])})" for why, names in reasons.items())
        warnings.warn(
            f"qfx.calibrate: all {len(recipe.sites)} matmuls stay float: {each}. "
            "Config(minimum_gain=0) quantizes what only costs time",
            stacklevel=3,
        )
    return recipe


def _measured(metric: Callable[[Model], float], model: Model, tried: Model) -> float:
    with unchanged(model, "calibrate"):
        return metric(tried)


def _observe(
    model: Model, batches: Iterable[Any], session: Session, progress: bool, what: str
) -> int:
    """Runs the batches and returns how many ran. Ctrl-C ends the run unless no batch was
    finished."""
    memory, count = max(_MEMORY * _parameter_bytes(model), _SMALLEST_MEMORY), 0
    with unchanged(model, "calibrate"):
        for batch in tqdm(batches, what, disable=not progress):
            try:
                inputs, keywords = arguments_of(batch)
                check_call(model, inputs, keywords)
                watch(model, session.run, *inputs, **keywords)
            except KeyboardInterrupt:
                if not count:
                    raise
                warnings.warn(f"{what}: interrupted, {count} batches count", stacklevel=3)
                break
            count += 1
            session.fit(memory)
    if not count:
        raise ValueError("calibrate: there are no batches")
    if not session.groups:
        raise ValueError(
            f"calibrate: {count} batches ran, but no matmul with a constant operand was captured "
            "that int8 suits (docs/limits.md)"
        )
    return count


def _parameter_bytes(model: Model) -> int:
    if not isinstance(model, nn.Module):
        return 0
    return sum(p.numel() * p.element_size() for p in model.parameters() if not is_lazy(p))


def _wanted(session: Session, config: Config) -> dict[SiteKey, SharedInput]:
    """Returns the groups of matmuls with one input, by key, without the matmuls that the config's
    patterns exclude."""
    patterns = Config(skip=config.skip, only=config.only)  # a static preset would require a recipe
    check_names(patterns, session.names)
    result = {}
    for key, group in session.groups.items():
        kept = tuple(r for r in group.readers if left_out(config, r.names) is None)
        if kept:
            result[key] = replace(group, readers=kept)
    return result


def _ranges(
    found: Found, observer: str, session: Session, observe: Callable[[str], object]
) -> dict[At, tuple[float, int]]:
    """Returns (scale, zero point) for the input of each candidate with a static scheme. The model
    runs once more, and the input is observed after smoothing and rotation."""
    static = {
        (key, i): (candidate, candidate.scheme.x)
        for key, each in found.items()
        for i, candidate in enumerate(each)
        if candidate.scheme and candidate.scheme.x and candidate.scheme.x.static
    }
    if not static:
        return {}
    watching = {at: OBSERVERS[observer](x.bits, x.symmetric) for at, (_, x) in static.items()}
    session.observers = defaultdict(list)
    for (key, i), (candidate, _) in static.items():
        session.observers[key].append((candidate.transform, watching[key, i]))
    observe("static ranges")
    return {
        at: step_of(*watching[at].range(), x.bits, x.symmetric) for at, (_, x) in static.items()
    }
