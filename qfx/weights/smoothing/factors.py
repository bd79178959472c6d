"""Smoothing factors: vectors that multiply the activation of a weight before both are rotated and
quantized.

They depend only on the module, so a model computes the same factors in every process, whatever it
was called with before.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qfx.host.modules import has_forward_hooks
from qfx.host.tensors import has_values, storage_id, without_modes, wraps_tensors
from qfx.weights.change_detection import Snapshot, snapshot
from qfx.weights.model_restore import unchanged
from qfx.weights.offload import drop_file_pages, is_offloaded
from qfx.weights.smoothing.input_moments import ChannelMoments, Read, Reads, reads_of
from qfx.weights.smoothing.inputs_embeds import why_embeddings
from qfx.weights.smoothing.token_ids import TokenIds, hooked, token_ids_of

log = logging.getLogger(__name__)
_STRENGTH = 0.35  # less than 1/2, as random ids give inexact statistics (decision 0024)
_LARGEST = 2.0**3  # largest factor, and inverse of the smallest (decision 0035)
_LEAST_IDS = 16  # fewest distinct ids, and effective rows of a channel, to use (decision 0035)
Factors = Mapping[tuple[int, int], tuple[float, ...]]  # by storage and axis of K


class TokenModule(NamedTuple):
    """A part of a model that takes token ids and nothing else.

    `table`: the storage of the embedding in which the ids are looked up. `factors`: the factors of
    its weights; if there are none, `reason` says why. `weights`: the storages of its parameters.
    `embeddings_reason`: the reason why a module around it may call it with embeddings instead of
    ids; '' if it is called with ids.
    """

    name: str
    table: int | None
    factors: Factors
    weights: frozenset[int | None]
    reason: str = ""
    embeddings_reason: str = ""


class _FactorCache(NamedTuple):
    weights: Snapshot
    modes: tuple[tuple[bool, bool], ...]  # for each part: whether it trains, and has hooks
    parts: tuple[TokenModule, ...]
    factors: Factors


_known: weakref.WeakKeyDictionary[nn.Module, _FactorCache] = weakref.WeakKeyDictionary()


def factors_of(module: nn.Module | None) -> Factors:
    """Returns the smoothing factors of the weights of all parts of the module, assuming that these
    parts are called with token ids."""
    known = _known_of(module)
    return known.factors if known else {}


def parts_of(module: nn.Module | None) -> tuple[TokenModule, ...]:
    """Returns the outermost parts of a module, or the module itself, that take token ids and
    nothing else.

    Returns an empty tuple if a part has hooks, if parameters wrap other tensors or have no values
    yet, or if it fails on the ids. Runs the parts on 8 x 64 seeded ids (docs/numerics.md (R4)).
    The result is kept while weights, modes and hooks do not change. Changes made by the run are
    undone.
    """
    known = _known_of(module)
    return known.parts if known else ()


def factors_without_graph(model: nn.Module, who: str) -> Factors:
    """Returns the smoothing factors of the parts of a model that, judging by signatures, are called
    with token ids. Logs at level INFO, with `who` in the message, which parts are smoothed and why
    others are not."""
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    for part in parts_of(model):
        why_not = part.reason or part.embeddings_reason
        found |= {} if why_not else part.factors
        use = f"not used, {why_not}" if why_not else f"of {len(part.factors)} weights"
        log.info("%s: smoothing of %s: %s", who, part.name, use)
    return found


def _known_of(module: nn.Module | None) -> _FactorCache | None:
    if module is None or any(map(_unreadable, module.parameters())):
        return None
    dense = (p for p in module.parameters() if p.layout == torch.strided)
    weights = tuple(p for p in dense if has_values(p))
    modes = tuple((part.training, has_forward_hooks(part)) for part in module.modules())
    known = _known.get(module)
    if known is None or known.modes != modes or not known.weights.unchanged(weights):
        before, parts = snapshot(weights), tuple(_found(module, ()))
        factors = {key: factor for part in parts for key, factor in part.factors.items()}
        known = _known[module] = _FactorCache(before, modes, parts, factors)
        for weight in filter(is_offloaded, weights):  # the run has loaded their pages
            drop_file_pages(weight)
    return known


def _unreadable(parameter: Tensor) -> bool:
    return is_lazy(parameter) or parameter.is_nested or wraps_tensors(parameter)


def _found(module: nn.Module, around: tuple[nn.Module, ...]) -> Iterator[TokenModule]:
    """Yields the outermost parts of `module` that take token ids. `around`: the modules that
    contain it, the outermost first."""
    own = _of_part(module)
    if own is not None:
        yield own._replace(
            embeddings_reason=next(filter(None, (why_embeddings(module, m) for m in around)), "")
        )
    if own is None or own.reason:
        for child in module.children():
            yield from _found(child, (*around, module))


def _of_part(module: nn.Module) -> TokenModule | None:
    ids = token_ids_of(module)
    if ids is None or hooked(module):
        return None
    table, reads = _reads(module, ids)
    if table is None:
        return None
    name, weights = type(module).__name__, frozenset(map(storage_id, module.parameters()))
    part = TokenModule(name, storage_id(table), {}, weights)
    if unused := [n for n, p in module.named_parameters() if storage_id(p) not in reads.used]:
        log.debug("%s takes more than token ids: %s", name, ", ".join(unused))
        return part._replace(reason=f"{name} takes more than token ids")
    if table.shape[0] < _LEAST_IDS:
        few = f"{name} has a vocabulary of {table.shape[0]}, and {_LEAST_IDS} ids are needed"
        return part._replace(reason=few)
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    for joined, moments in reads.sets():
        factor = _factor(moments, joined)
        if factor is not None:
            found |= {(storage_id(r.weight) or 0, r.axis): factor for r in joined}
    return part._replace(factors=found)


def _reads(module: nn.Module, ids: TokenIds) -> tuple[Tensor | None, Reads]:
    """Returns the embedding table in which the module looks up the ids, and the matmuls that it
    then computes. The table is None if the module does not look up the ids, or fails on them."""
    embeddings = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
    tables = {storage_id(table): table for table in (*embeddings, ids.table)}
    tried = set[int | None]()
    while storage_id(ids.table) not in tried:  # runs again if the ids were drawn for another table
        tried.add(storage_id(ids.table))
        reads = _run(module, ids)
        found = set.union(*reads.looked_up.values()) if reads else set()
        if storage_id(ids.table) in found:
            return ids.table, reads or Reads()
        other = [tables[i] for i in found if i in tables] or ([] if reads else [*tables.values()])
        if other:
            ids = ids._replace(table=min(other, key=len))
    return None, Reads()


def _run(module: nn.Module, ids: TokenIds) -> Reads | None:
    """Runs the module on the ids and returns its matmuls and lookups; None if it fails. `looked_up`
    of the result contains only lookups of these ids."""
    given: list[Tensor] = []
    try:
        plain = torch.autocast(ids.table.device.type, enabled=False)  # independent of the caller
        with torch.inference_mode(False), without_modes(), plain, unchanged(module, "smoothing"):
            torch.default_generator.manual_seed(0)
            reads = reads_of(lambda: given.extend(ids.call(module)), module.parameters())
    except Exception:  # a module that needs other inputs may raise any exception
        log.debug("%s does not take token ids alone", type(module).__name__, exc_info=True)
        return None
    into = {storage_id(each): reads.looked_up.get(storage_id(each), set()) for each in given}
    reads.looked_up = into if all(into.values()) else {None: set()}
    return reads


def _factor(moments: ChannelMoments, reads: list[Read]) -> tuple[float, ...] | None:
    """Returns the smoothing factor [K] for weights that share an input: c / z with z_k = (rms_k /
    max_n |w_nk|)^_STRENGTH, and c the median of z over the channels that enough rows reach; at most
    1 for the other channels. None if it cannot be computed. Equation (R4)."""
    largest = torch.stack([r.weight.abs().amax(1 - r.axis).float() for r in reads]).amax(0)
    square = moments.square
    if square.shape != largest.shape:
        return None
    log_rms = square.clamp_min(1e-30).log() / 2
    log_z = _STRENGTH * (log_rms - largest.clamp_min(1e-15).log())
    reached = moments.effective_rows >= _LEAST_IDS
    if not bool(log_z.isfinite().all() and reached.any()):
        return None
    most = torch.where(reached, _LARGEST, 1.0)
    factor = (log_z[reached].median() - log_z).exp().clamp_min(1 / _LARGEST).minimum(most)
    return tuple(factor.cpu().tolist())
