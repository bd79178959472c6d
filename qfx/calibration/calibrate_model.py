"""calibrate: a model and batches of its inputs -> a Recipe that says how each site is quantized."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from qfx.calibration.goals import check_goal, check_names_of, checked_bytes, ladder_of
from qfx.calibration.losses import Loss
from qfx.calibration.observers import OBSERVERS, step_of
from qfx.calibration.prediction import predicted
from qfx.calibration.record import Session, SharedInput, SiteKey
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
from qfx.dynamo_backend.captured_graphs import watch
from qfx.values.config import Config, Configurable
from qfx.values.recipe import Recipe
from qfx.values.scheme import Scheme
from qfx.values.select import check_names, left_out
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.model_restore import in_training, unchanged

Model = Callable[..., Any]
Found = Mapping[SiteKey, Sequence[Candidate]]
At = tuple[SiteKey, int]  # a candidate: its group, and which it is there
_SMALLEST_MEMORY = 2**24  # bytes
_MEMORY = 0.125  # of the bytes of the model's parameters that samples may take
_MOMENTS = 0.25  # and that the second moments of inputs may


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
    """Runs `model` on `batches` in float and chooses scheme, smoothing and ranges for each site.

    `batches`: inputs, each a tensor, a tuple for `model(*batch)` or a mapping for
    `model(**batch)`; a tensor or a mapping by itself is one batch; `transform` makes
    one of what `batches` gives, as `lambda batch: batch[0]` does for a loader of inputs and labels.
    `config`: its `scheme` is tried with several strengths
    of smoothing, and with up to 8 outlying features in float; sites of a static preset may fall
    back to dynamic scales per token. `observer`: how static ranges are found: minmax,
    moving-average, percentile (99.99), mse or entropy. `rounding`: how the weights of what is
    chosen become codes: "nearest", or "gptq", which for the inputs that were seen loses less, at no
    cost in the kernels, or "gptq-sequential", which also makes good a part of what the matmuls
    before have lost: worth it at few bits, for a model that is captured as one graph. These codes
    belong to these weights and no others. They and static scales need batches that can be read
    twice.

    `also`: presets or schemes that are tried beside that of the config, so that matmuls whose error
    costs more get more bits.

    Four ways to choose. By default the result is the fastest choice, by the cost model, whose
    error, summed over sites as noise power relative to signal, is at most `max_sqnr_loss_db` above
    that of the most accurate one. With `metric(quantized_model) -> float`, higher being better, it
    is the fastest whose metric is at most `max_drop` below that of `model`; sites may then stay
    float.

    With `max_divergence` it is a fast one whose sites are predicted to change what the model
    returns by no more than that, all together (docs/numerics.md (D1)); sites may stay float. The
    prediction takes gradients of a `loss`: "labels", drawn from the distribution that the logits
    are, for a divergence in nats of a prediction; "direction", a random one for each row of the
    output, for half of its squared relative error, which is 1 - cosine; or a function of what the
    model returns to the loss of each prediction, whose labels should be the model's own. The
    default is "labels" where the model calls something it returns `logits`. Gradients are those of
    the last quarter of the batches, at most 8, which "gptq" then does not see; they are read again.
    Parameters, their gradients and whether they have some stay as they are.

    With `max_bits` the weights take at most so many bits an element, together and with their
    scales, and the divergence, predicted in the same way, is the least that is found.

    The model runs in the mode that it is in: in training mode what dropout and the statistics of
    batches do to activations is recorded, with a warning. Batches see what earlier ones left; after
    the last, and after each call of `metric`, model and default random generators are as before, as
    after `qfx.explain`.

    Ctrl-C ends the observation: the batches that were seen count. Memory: samples of at most 256
    rows an activation, and an eighth of the model or 16 MiB; the buffers once more; for "gptq" the
    codes, a quarter of the model beside them and some matrices [K, K] of the largest K; for
    "gptq-sequential" what all batches hold at one matmul, twice, in place of the quarter; for
    `max_divergence` what one batch keeps for its gradients, and for "gptq" the codes of every
    candidate. Raises ValueError for no batches, for batches that the model cannot be called with,
    for a pattern that fits nothing, for an unknown observer, rounding or loss, where no graph was
    captured, and where no gradient reaches a matmul.
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
    groups, cost = _wanted(session, config), current_costs().cpu or MachineCost()
    found = {
        key: candidates(group, ladder, observer, cost, config.minimum_gain)
        for key, group in tqdm(groups.items(), "searching", disable=not progress)
    }
    ranges = _ranges(found, observer, session, observe)

    def with_codes(chosen: Chosen, seen: Iterable[Any] = batches) -> Chosen:
        if rounding == NEAREST:
            return chosen
        if rounding == SEQUENTIAL:
            run = partial(sequential, model, seen, groups, observer, progress)
            return rounded_in_turn(groups, chosen, observer, run)
        watching = partial(_observe, model, seen, session, progress)
        return rounded(groups, chosen, rounding, observer, session, watching, memory)

    def recipe_of(choice: Choice, finish: Callable[[Chosen], Chosen] = dict) -> Recipe:
        chosen = finish({key: found[key][i] for key, i in zip(found, choice, strict=True)})
        steps = {key: ranges.get((key, i)) for key, i in zip(found, choice, strict=True)}
        return Recipe(tuple(_sites(groups, chosen, steps)))

    if predicts:
        seen, held = parted(batches, count)
        found = all_rounded(found, partial(with_codes, seen=seen))
        shown = tqdm(held, "gradients", total=len(held), disable=not progress)
        found = predicted(model, shown, loss, groups, found, observer)
        each = [*found.values()]
        if max_divergence is not None:
            return recipe_of(by_divergence(each, max_divergence))
        return recipe_of(by_bytes(each, checked_bytes(max_bits, groups, each)))
    if metric is None:
        return _told(recipe_of(by_error([*found.values()], max_sqnr_loss_db), with_codes))
    measure = partial(_measured, metric, model)
    wanted = measure(model)

    def drop(choice: Choice) -> float:
        return wanted - measure(quantized(model, replace(config, recipe=recipe_of(choice))))

    return recipe_of(by_metric([*found.values()], drop, max_drop), with_codes)


def _told(recipe: Recipe) -> Recipe:
    """Itself, and a warning with the reasons where it leaves everything float."""
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
    """Runs the batches, and says how many; Ctrl-C ends it, unless nothing was seen."""
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
    """The groups without the sites that the config's patterns leave out."""
    patterns = Config(skip=config.skip, only=config.only)  # a static preset would ask for a recipe
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
    """(scale, zero point) of each static candidate's activation, observed as it is transformed."""
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


def _sites(
    groups: Mapping[SiteKey, SharedInput],
    chosen: Chosen,
    ranges: Mapping[SiteKey, tuple[float, int] | None],
) -> Iterator[SiteRecipe]:
    for key, group in groups.items():
        candidate = chosen[key]
        scheme, factor = candidate.scheme, candidate.transform.factor
        scale, zero_point = ranges[key] or (None, None)
        if scheme is None or scheme.x is None or scheme.x.symmetric:
            zero_point = None
        none = [None] * len(group.readers)
        codes, divergences = candidate.roundings or none, candidate.divergences if scheme else none
        for i, reader in enumerate(group.readers):
            error, divergence = candidate.errors[i], (divergences or none)[i]
            n, k = reader.w_nk.shape
            yield SiteRecipe(
                *reader.key,
                n=n,
                k=k,
                scheme=scheme,
                factor=None if factor is None else tuple(factor.tolist()),
                scale=scale,
                zero_point=zero_point,
                sqnr_db=round(-10 * math.log10(error), 2) if error > 0 else None,  # nor of NaN
                reason=candidate.reason,
                outliers=candidate.transform.outliers,
                rounding=codes[i],
                divergence=None if divergence is None else float(f"{divergence:.3g}"),
            )
