"""calibrate: a model and batches of its inputs -> a Recipe that says how each site is quantized."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from tqdm import tqdm

from qfx.calibration.choose import Choice, by_error, by_metric
from qfx.calibration.observers import OBSERVERS, step_of
from qfx.calibration.record import Session, SharedInput, SiteKey
from qfx.calibration.rounding import NEAREST, ROUNDINGS, Chosen, rounded
from qfx.calibration.search import Candidate, candidates
from qfx.calibration.with_recipe import quantized
from qfx.captured_graphs import watch
from qfx.cost.chosen import chosen_costs
from qfx.cost.machine import MachineCost
from qfx.graph.unchanged import in_training, unchanged
from qfx.values.config import Config
from qfx.values.recipe import Recipe
from qfx.values.scheme import PER_ROW, Scheme
from qfx.values.select import check_names, left_out
from qfx.values.site_recipe import SiteRecipe

Model = Callable[..., Any]
Found = Mapping[SiteKey, Sequence[Candidate]]
At = tuple[SiteKey, int]  # a candidate: its group, and which it is there
_SMALLEST_MEMORY = 2**24  # bytes
_MEMORY = 0.125  # of the bytes of the model's parameters that samples may take
_MOMENTS = 0.25  # and that the second moments of inputs may


def calibrate(
    model: Model,
    batches: Iterable[Any],
    config: Config | None = None,
    *,
    observer: str = "minmax",
    rounding: str = NEAREST,
    max_sqnr_loss_db: float = 1.0,
    metric: Callable[[Model], float] | None = None,
    max_drop: float = 0.0,
    progress: bool = True,
) -> Recipe:
    """Runs `model` on `batches` in float and chooses scheme, smoothing and ranges for each site.

    `batches`: of inputs, each a tensor, a tuple for `model(*batch)` or a mapping for
    `model(**batch)`. `config`: its `scheme` is tried with several strengths of smoothing, and with
    up to 8 outlying features in float; sites of a static preset may fall back to dynamic scales per
    token. `observer`: how static ranges are found: minmax, moving-average, percentile (99.99), mse
    or entropy. `rounding`: how the weights of what is chosen become codes: "nearest", or "gptq",
    which for the inputs that were seen loses less, at no cost in the kernels. Its codes belong to
    these weights and no others. Static scales and "gptq" need batches that can be read twice.

    Without a `metric` the result is the fastest choice, by the cost model, whose error, summed over
    sites as noise power relative to signal, is at most `max_sqnr_loss_db` above that of the most
    accurate one. With `metric(quantized_model) -> float`, higher being better, it is the fastest
    whose metric is at most `max_drop` below that of `model`; sites may then stay float.

    The model runs in the mode that it is in: in training mode what dropout and the statistics of
    batches do to activations is recorded, with a warning. Batches see what earlier ones left; after
    the last, and after each call of `metric`, model and default random generators are as before, as
    after `qfx.explain`.

    Ctrl-C ends the observation: the batches that were seen count. Memory: samples of at most 256
    rows an activation, and an eighth of the model or 16 MiB; the buffers once more; for "gptq" the
    codes, a quarter of the model beside them and some matrices [K, K] of the largest K. Raises
    ValueError for no batches, for a pattern that fits nothing, for an unknown observer or rounding,
    and where no graph was captured.
    """
    config = config or Config()
    if observer not in OBSERVERS:
        raise ValueError(f"unknown observer {observer!r}; choose from {', '.join(OBSERVERS)}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; choose from {', '.join(ROUNDINGS)}")
    ladder = _ladder(config)
    again = "static ranges are observed" if any(s.calibrated for s in ladder) else ""
    again = again or ("" if rounding == NEAREST else "codes are found")
    if again and iter(batches) is batches:
        raise ValueError(
            f"calibrate: {again} in a second pass, but these batches can be read only once; give a "
            "list or a DataLoader"
        )
    if training := in_training(model):
        warnings.warn(
            f"qfx.calibrate: {training} in training mode: what dropout and batch statistics do is "
            "in what is recorded; call model.eval() first for a recipe for inference",
            stacklevel=2,
        )
    session = Session()
    observe = partial(_observe, model, batches, session, progress)
    observe("calibrating")
    groups, cost = _wanted(session, config), chosen_costs().cpu or MachineCost()
    found = {
        key: candidates(group, ladder, observer, cost, config.minimum_gain)
        for key, group in tqdm(groups.items(), "searching", disable=not progress)
    }
    ranges = _ranges(found, observer, session, observe)

    def recipe_of(choice: Choice, method: str = NEAREST) -> Recipe:
        chosen: Chosen = {key: found[key][i] for key, i in zip(found, choice, strict=True)}
        steps = {key: ranges.get((key, i)) for key, i in zip(found, choice, strict=True)}
        if method != NEAREST:
            memory = max(_MOMENTS * _parameter_bytes(model), _SMALLEST_MEMORY)
            chosen = rounded(groups, chosen, method, observer, session, observe, memory)
        return Recipe(tuple(_sites(groups, chosen, steps)))

    if metric is None:
        return recipe_of(by_error([*found.values()], max_sqnr_loss_db), rounding)
    measure = partial(_measured, metric, model)
    wanted = measure(model)

    def drop(choice: Choice) -> float:
        return wanted - measure(quantized(model, replace(config, recipe=recipe_of(choice))))

    return recipe_of(by_metric([*found.values()], drop, max_drop), rounding)


def _ladder(config: Config) -> tuple[Scheme, ...]:
    """The schemes to try: that of the config, and for a static preset also the one whose scales are
    found at run time, for each token."""
    asked = config.chosen
    if not isinstance(config.scheme, str) or asked.x is None or not asked.x.static:
        return (asked,)
    return asked, replace(asked, x=replace(asked.x, static=False, axes=PER_ROW))


def _measured(metric: Callable[[Model], float], model: Model, tried: Model) -> float:
    with unchanged(model, "calibrate"):
        return metric(tried)


def _observe(
    model: Model, batches: Iterable[Any], session: Session, progress: bool, what: str
) -> None:
    """Runs the batches; Ctrl-C ends it, unless nothing was seen."""
    memory, count = max(_MEMORY * _parameter_bytes(model), _SMALLEST_MEMORY), 0
    with unchanged(model, "calibrate"):
        for batch in tqdm(batches, what, disable=not progress):
            try:
                _run(model, batch, session)
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
            f"calibrate: {count} batches ran, but no matmul with a constant operand was captured"
        )


def _run(model: Model, batch: Any, session: Session) -> None:
    if isinstance(batch, Mapping):
        watch(model, session.run, **batch)
    elif isinstance(batch, list | tuple):
        watch(model, session.run, *batch)
    else:
        watch(model, session.run, batch)


def _parameter_bytes(model: Model) -> int:
    if not isinstance(model, nn.Module):
        return 0
    return sum(p.numel() * p.element_size() for p in model.parameters())


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
    found: Found, observer: str, session: Session, observe: Callable[[str], None]
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
        roundings = candidate.roundings or [None] * len(group.readers)
        for reader, error, codes in zip(group.readers, candidate.errors, roundings, strict=True):
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
                rounding=codes,
            )
