"""Factors: per weight what its activation is multiplied by before both are rotated and quantized.

They depend on the module alone, so a model computes the same numbers in every process, whatever it
was called with before.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qfx.graph.unchanged import unchanged
from qfx.host.modules import has_forward_hooks
from qfx.host.tensors import has_values, storage_id, without_modes, wraps_tensors
from qfx.memory.held import drop_file_pages, is_held
from qfx.memory.seen import Seen, seen
from qfx.smoothing.activations import Read, reads_of
from qfx.smoothing.token_ids import hooked, token_ids_of

log = logging.getLogger(__name__)
_STRENGTH = 0.35  # below the 1/2 of known statistics: those of random ids are off (decision 0024)
_LARGEST = 2.0**6  # of a factor, and the inverse of the smallest: the ids do not reach all channels
Factors = Mapping[tuple[int, int], tuple[float, ...]]  # by storage and axis of K


class _Known(NamedTuple):
    weights: Seen
    modes: tuple[tuple[bool, bool], ...]  # of each part: whether it trains, and is hooked
    factors: Factors


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def factors_of(module: nn.Module | None) -> Factors:
    """Of the matrices that a module multiplies, or each of its outermost parts that take token ids
    and nothing else; not where hooks watch, where parameters wrap others or have no values yet, or
    where it fails on the ids. Runs them on 8 x 64 seeded ids (docs/numerics.md (R4)).

    Kept while weights, modes and hooks stay. What a run of it changes is put back.
    """
    if module is None or any(is_lazy(p) or wraps_tensors(p) for p in module.parameters()):
        return {}
    weights = tuple(p for p in module.parameters() if has_values(p))
    modes = tuple((part.training, has_forward_hooks(part)) for part in module.modules())
    known = _known.get(module)
    if known is None or known.modes != modes or not known.weights.unchanged(weights):
        snapshot = seen(weights, range(len(weights)))
        known = _known[module] = _Known(snapshot, modes, _found(module))
        for weight in filter(is_held, weights):  # what it read of them has been fetched
            drop_file_pages(weight)
    return known.factors


def _found(module: nn.Module) -> Factors:
    if own := _of_part(module):
        return own
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    for child in module.children():
        found |= _found(child)
    return found


def _of_part(module: nn.Module) -> Factors:
    ids = token_ids_of(module)
    if ids is None or hooked(module):
        return {}
    looked_up: list[Tensor] = []
    try:
        plain = torch.autocast(ids.table.device.type, enabled=False)  # whoever compiles it first
        with torch.inference_mode(False), without_modes(), plain, unchanged(module, "smoothing"):
            torch.default_generator.manual_seed(0)
            reads = reads_of(lambda: looked_up.extend(ids.call(module)), module.parameters())
    except Exception:  # of a module that takes something else, which may be of any kind
        log.debug("%s does not take token ids alone", type(module).__name__, exc_info=True)
        return {}
    if {storage_id(each) for each in looked_up} - reads.embedded:
        return {}
    if unused := [n for n, p in module.named_parameters() if storage_id(p) not in reads.used]:
        log.debug("%s takes more than token ids: %s", type(module).__name__, ", ".join(unused))
        return {}
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    for joined, square in reads.sets():
        factor = _factor(square, joined)
        if factor is not None:
            found |= {(storage_id(r.weight) or 0, r.axis): factor for r in joined}
    return found


def _factor(square: Tensor, reads: list[Read]) -> tuple[float, ...] | None:
    """1 / z, z_k = (rms_k / max_n |w_nk|)^_STRENGTH over the median of all. (R4)"""
    largest = torch.stack([r.weight.abs().amax(1 - r.axis).float() for r in reads]).amax(0)
    if square.shape != largest.shape:
        return None
    log_rms = square.clamp_min(1e-30).log() / 2
    log_z = _STRENGTH * (log_rms - largest.clamp_min(1e-15).log())
    if not bool(log_z.isfinite().all()):
        return None
    factor = (log_z.median() - log_z).exp().clamp(1 / _LARGEST, _LARGEST)
    return tuple(factor.cpu().tolist())
