"""calibrate: a model and batches of its inputs -> a Recipe that says how each site is quantized."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from qfx.calibration.choose import Choice, by_error, by_metric
from qfx.calibration.observers import OBSERVERS, step_of
from qfx.calibration.record import Group, Session
from qfx.calibration.search import Candidate, candidates
from qfx.config import Config
from qfx.cost import MachineCost
from qfx.plan import check_patterns, fits
from qfx.recipe import Recipe, SiteRecipe
from qfx.scheme import PER_ROW, Scheme
from qfx.watch import uncompiled_module, watch

Model = Callable[..., Any]
_MEMORY = 0.25  # of the bytes of the model's parameters that samples may take


def calibrate(
    model: Model,
    batches: Iterable[Any],
    config: Config | None = None,
    *,
    observer: str = "minmax",
    max_sqnr_loss_db: float = 1.0,
    metric: Callable[[Model], float] | None = None,
    max_drop: float = 0.0,
    progress: bool = True,
) -> Recipe:
    """Runs `model` on `batches` in float and chooses scheme, smoothing and ranges for each site.

    `batches`: of inputs, each a tensor, a tuple for `model(*batch)` or a mapping for
    `model(**batch)`. `config`: its `scheme` gives the candidates, each tried with and without
    rotation if it is a preset, and with several strengths of smoothing; static schemes may fall
    back to dynamic ones per token, and need batches that can be read twice. `observer`: how static
    ranges are found: minmax, moving-average, percentile (99.99), mse or entropy.

    Without a `metric` the result is the fastest choice, by the cost model, whose error, summed over
    sites as noise power relative to signal, is at most `max_sqnr_loss_db` above that of the most
    accurate one. With `metric(quantized_model) -> float`, higher being better, it is the fastest
    whose metric is at most `max_drop` below that of `model`; sites may then stay float.

    Ctrl-C ends the observation: the batches that were seen count. Memory: samples of at most 256
    rows an activation and a quarter of the model. Raises ValueError for no batches, for a pattern
    that fits nothing, for an unknown observer, and where no graph was captured.
    """
    config = config or Config()
    if observer not in OBSERVERS:
        raise ValueError(f"unknown observer {observer!r}; choose from {', '.join(OBSERVERS)}")
    ladder = _ladder(config)
    if any(s.x is not None and s.x.static for s in ladder) and iter(batches) is batches:
        raise ValueError(
            "calibrate: static ranges are observed in a second pass, but these batches can be read "
            "only once; give a list or a DataLoader"
        )
    session = Session()
    _observe(model, batches, session, progress, "calibrating")
    groups = _wanted(session, config)
    found = [
        _affordable(list(candidates(g, ladder, observer, MachineCost())), config)
        for g in tqdm(groups, "searching", disable=not progress)
    ]
    if metric is None:
        choice = by_error(found, max_sqnr_loss_db)
        return _recipe(model, batches, session, groups, found, choice, observer, progress)
    wanted = metric(model)

    def drop(tried: Choice) -> float:
        recipe = _recipe(model, batches, session, groups, found, tried, observer, False)
        return wanted - metric(_quantized(model, replace(config, recipe=recipe)))

    choice = by_metric(found, drop, max_drop)
    return _recipe(model, batches, session, groups, found, choice, observer, progress)
