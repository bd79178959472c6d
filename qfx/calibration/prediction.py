"""Predicts how much each candidate (a way to quantize matmuls) changes the model's output, equation
(D1).

A few batches run forward and backward. After each batch, the errors of every candidate on the
sampled rows are combined with the gradients at these rows, so only one batch is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qfx.calibration.batches import arguments_of
from qfx.calibration.losses import Loss, losses_of
from qfx.calibration.record import SharedInput
from qfx.calibration.search import Candidate, costs_of_errors
from qfx.calibration.sensitivity import Gradients
from qfx.dynamo_backend.captured_graphs import watch_recording
from qfx.io.errors import UserError
from qfx.match.selection import SiteKey
from qfx.weights.model_restore import module_of, unchanged


def predicted(
    model: Callable[..., Any],
    batches: Iterable[Any],
    loss: Loss | None,
    groups: Mapping[SiteKey, SharedInput],
    found: Mapping[SiteKey, Sequence[Candidate]],
    observer: str,
) -> dict[SiteKey, list[Candidate]]:
    """Returns the candidates `found` of each group, now with the divergence that each of their
    matmuls causes: NaN if no gradient was seen."""
    random, predictions = torch.Generator().manual_seed(0), 0
    totals: dict[SiteKey, Tensor] = {}  # [candidates, sites]
    with unchanged(model, "calibrate"), _constant_parameters(model):
        for batch in batches:
            gradients, (inputs, keywords) = Gradients(random), arguments_of(batch)
            output = watch_recording(model, gradients.run, *inputs, **keywords)
            losses = losses_of(output, loss, random)
            gradients.back(losses)
            predictions += losses.numel()
            del output, losses
            for key in gradients.calls.keys() & groups.keys():
                added = costs_of_errors(groups[key], found[key], observer, gradients.calls[key])
                totals[key] = totals.get(key, 0.0) + added
    if not predictions:
        raise UserError("calibrate: the batches that are held out have no prediction in them")
    unseen = torch.full((1, 1), torch.nan, dtype=torch.float64, device="cpu")
    return {
        key: _with_divergences(
            each, totals.get(key, unseen).clamp_min(0) / (2 * predictions), groups[key]
        )
        for key, each in found.items()
    }


@contextmanager
def _constant_parameters(model: Callable[..., Any]) -> Iterator[None]:
    """Makes trainable parameters constants to autograd inside the `with` block. Modules then run as
    they do without gradients (the encoders of torch.nn take their fast path), and no memory is used
    for gradients of weights."""
    module = module_of(model)
    trained = [p for p in module.parameters() if p.requires_grad] if module else []
    try:
        for p in trained:
            p.requires_grad_(False)
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def _with_divergences(
    each: Sequence[Candidate], divergences: Tensor, group: SharedInput
) -> list[Candidate]:
    """Returns the candidates with their divergences. The float candidate has divergence 0, and its
    reason states what int8 would add. Its time is set to at least 1.1 times that of the fastest
    int8 candidate, so that int8 is preferred for matmuls that passed the minimum gain."""
    rows = divergences.expand(len(each), len(group.readers)).tolist()
    candidates = [replace(c, divergences=tuple(row)) for c, row in zip(each, rows, strict=True)]
    least = min((c.divergence for c in candidates if c.scheme), default=0.0)
    unknown = least == math.inf
    why = "no gradient was seen" if unknown else f"int8 would add {least:.2g} of divergence"
    slower = 1.1 * min((c.seconds for c in candidates if c.scheme), default=0.0)
    return [c if c.scheme else _in_float(c, len(group.readers), why, slower) for c in candidates]


def _in_float(candidate: Candidate, sites: int, why: str, slower: float) -> Candidate:
    seconds, reason = max(candidate.seconds, slower), candidate.reason or why
    return replace(candidate, divergences=(0.0,) * sites, seconds=seconds, reason=reason)
