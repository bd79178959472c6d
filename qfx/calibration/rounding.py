"""Rounds the weights of int8 matmuls with GPTQ, for the inputs that the matmuls receive.

The second moments of all inputs would take as much memory as the model. Therefore the model runs on
the batches several times, and each run collects the second moments of as many inputs as fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qfx.calibration.experts import few
from qfx.calibration.gptq import ComparedMoments, Hessian, Order, ordered, rounded_codes
from qfx.calibration.record import Session, SharedInput, Transform
from qfx.calibration.search import Candidate, errors_of
from qfx.match.selection import SiteKey
from qfx.ops.packing import Packing
from qfx.ops.single_tensors import quantize
from qfx.values.rounding import METHODS, Rounding
from qfx.values.scheme import PER_COLUMN, PER_ROW, QSpec
from qfx.weights.recipe_codes import digest_for

NEAREST = "nearest"
SEQUENTIAL = "gptq-sequential"
ROUNDINGS = (NEAREST, *METHODS)
_FLOAT32 = 4  # bytes
_ROWS = 4096  # of a weight that are rounded at once, if each row is quantized by itself
Chosen = Mapping[SiteKey, Candidate]  # by the key of the group


def rounded(
    groups: Mapping[SiteKey, SharedInput],
    chosen: Chosen,
    method: str,
    observer: str,
    session: Session,
    observe: Callable[[str], object],
    memory: float,
) -> dict[SiteKey, Candidate]:
    """Returns the chosen candidates with weights that GPTQ has rounded. A candidate that GPTQ
    cannot round is returned with the reason; its weights are rounded to nearest. Float candidates
    are returned unchanged.

    `groups`, `chosen`: the groups of matmuls and the candidate chosen for each, by the key of the
    group. `method`: the name of the method, which the roundings record. `observer`: how static
    ranges are found, for the errors of the candidates. `session`: collects the second moments.
    `observe` runs all batches; its argument is the title of the progress bar. `memory`: the bytes
    that the second moments of one run may take; those of a single group may take more.
    """
    result = {key: _with_rounding_reason(candidate) for key, candidate in chosen.items()}
    wanted = [key for key, candidate in result.items() if candidate.scheme and not candidate.reason]
    passes = [*_passes(wanted, groups, memory)]
    for i, keys in enumerate(passes, 1):
        moments = {key: Hessian(groups[key].activation.k) for key in keys}
        session.observers = defaultdict(list)
        for key in keys:
            session.observers[key].append((chosen[key].transform, moments[key]))
        observe(f"rounding, {i} of {len(passes)}")
        session.observers = defaultdict(list)
        for key in keys:
            given = (groups[key], chosen[key], moments.pop(key))
            result[key] = _rounded(*given, method, observer)
    return result


def rounded_in_turn(
    groups: Mapping[SiteKey, SharedInput],
    chosen: Chosen,
    observer: str,
    run: Callable[[Chosen, Callable[[SiteKey, ComparedMoments], Candidate]], None],
) -> dict[SiteKey, Candidate]:
    """Rounds the weights of one group after the other by equation (Q11); returns the candidates
    with the rounded weights, like `rounded`.

    `run(chosen, round_group)` must call `round_group(key, moments)`, which rounds the weights of a
    group and returns its candidate, for each int8 group in the order in which the groups run.
    `qfx.calibration.sequential.sequential` does so.
    """
    result = {key: _with_rounding_reason(candidate) for key, candidate in chosen.items()}

    def round_group(key: SiteKey, moments: ComparedMoments) -> Candidate:
        if not result[key].reason:
            result[key] = _rounded(groups[key], chosen[key], moments, SEQUENTIAL, observer)
        return result[key]

    run(chosen, round_group)
    return result


def all_rounded(
    found: Mapping[SiteKey, Sequence[Candidate]], rounded_of: Callable[[Chosen], Chosen]
) -> dict[SiteKey, list[Candidate]]:
    """Returns all candidates of each group with rounded weights. Each call of `rounded_of` rounds
    one candidate per group."""
    result: dict[SiteKey, list[Candidate]] = {key: [] for key in found}
    for i in range(max(map(len, found.values()), default=0)):
        chosen = rounded_of({key: each[i] for key, each in found.items() if i < len(each)})
        for key, candidate in chosen.items():
            result[key].append(candidate)
    return result


def _with_rounding_reason(candidate: Candidate) -> Candidate:
    """Returns the candidate, with a reason if GPTQ cannot round its weights, which are then rounded
    to nearest."""
    scheme = candidate.scheme
    if scheme is None or scheme.w.axes != PER_COLUMN:
        return candidate
    return replace(candidate, reason=f"rounded to nearest: {scheme} has a factor of its weight")


def _passes(
    keys: Sequence[SiteKey], groups: Mapping[SiteKey, SharedInput], memory: float
) -> Iterator[list[SiteKey]]:
    """Yields, for each run over the batches, the keys of as many groups as have second moments that
    fit into `memory` bytes."""
    now, taken = list[SiteKey](), 0
    for key in keys:
        size = _FLOAT32 * groups[key].activation.k ** 2
        if now and taken + size > memory:
            yield now
            now, taken = [], 0
        now.append(key)
        taken += size
    if now:
        yield now


def _rounded(
    group: SharedInput, candidate: Candidate, moments: Hessian, method: str, observer: str
) -> Candidate:
    assert candidate.scheme is not None
    reason = few(moments.rows) if group.product else ""
    order = None if reason else ordered(moments)
    factor, rotation, outliers = candidate.transform
    given = None if factor is None else tuple(factor.tolist())
    packing, found = Packing(candidate.scheme.w, given, rotation, outliers), []
    for reader in group.readers:
        w_nk, (name, call) = reader.w_nk, reader.key
        codes = _codes(w_nk, candidate.transform, packing.spec, order)
        site = f"{name}[{call}]" if call else name
        found.append(Rounding(site, method, digest_for(w_nk, packing), codes))
    candidate = replace(candidate, roundings=tuple(found), reason=reason)
    return replace(candidate, errors=errors_of(group, candidate, observer))


def _codes(w_nk: Tensor, transform: Transform, spec: QSpec, order: Order | None) -> Tensor:
    """Returns a weight rounded to int8 [N, K]; to nearest if `order` is None. Rows are processed in
    blocks to save memory, for example for the output layer of a language model."""
    codes = torch.empty(w_nk.shape, dtype=torch.int8, device=w_nk.device)
    rows = _ROWS if spec.axes == PER_ROW else max(w_nk.shape[0], 1)
    for w, out in zip(w_nk.split(rows), codes.split(rows), strict=True):
        values = transform.of_weight(w)
        out.copy_(rounded_codes(values, spec, order) if order else quantize(values, spec).codes)
    return codes
